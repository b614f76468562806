// A tile of a weight gradient in registers: HIGH pairs (tap, input channel) x WIDE output channels, over the outputs of
// a band. Each output loads 2 vectors of the gradient and a source value of each pair, for 2 HIGH multiply-adds.
#pragma once
#include "tile.h"

// The outputs of a band, the steps between samples, rows and pixels of the source, and what of the gradient lies between
// the rows of two samples.
struct Outputs { int64_t samples, rows, width, sample_step, row_step, step, between = 0; };

// Adds the products of P pairs and V vectors of output channels to `sums`, [P][WIDE]: of a depthwise convolution, whose
// output channels read a source channel each, of P taps. Loops over the sums are unrolled early, so that the compiler
// keeps no copy of them in memory.
template <bool DEPTHWISE, int P, int V>
static void sum_pairs(const float* x, const int64_t* offsets, const float* grad, const Outputs& outputs, float* sums) {
  Vector sum[P * V] = {};
  const float* pair[P];
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) pair[p] = x + offsets[p];
  for (int64_t sample = 0; sample < outputs.samples; ++sample, grad += outputs.between)
    for (int64_t row = 0; row < outputs.rows; ++row) {
      int64_t at = sample * outputs.sample_step + row * outputs.row_step;
      for (int64_t i = 0; i < outputs.width; ++i, at += outputs.step, grad += WIDE) {
        Vector g[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) g[v] = load(grad + v * LANES);
#pragma GCC unroll 32
        for (int s = 0; s < P * V; ++s) {
          if constexpr (DEPTHWISE) sum[s] += g[s % V] * load(pair[s / V] + at + s % V * LANES);
          else sum[s] += g[s % V] * pair[s / V][at];
        }
      }
    }
#pragma GCC unroll 32
  for (int s = 0; s < P * V; ++s) {
    float* to = sums + s / V * WIDE + s % V * LANES;
    store(to, load(to) + sum[s]);
  }
}

using Pairs = void (*)(const float*, const int64_t*, const float*, const Outputs&, float*);
template <bool DEPTHWISE, int V, int... P>
constexpr std::array<Pairs, HIGH> pairs(std::integer_sequence<int, P...>) {
  return {sum_pairs<DEPTHWISE, P + 1, V>...};
}
template <bool DEPTHWISE>
constexpr std::array<Pairs, HIGH> TABLES[2] = {pairs<DEPTHWISE, 1>(std::make_integer_sequence<int, HIGH>{}),
                                               pairs<DEPTHWISE, 2>(std::make_integer_sequence<int, HIGH>{})};
static constexpr auto& PAIRS = TABLES<false>;
