// A tile of sums in registers: 6 rows (12 where there are 32 registers) x 2 vectors of columns. Each step loads 2 vectors
// and a value of each row, for 12 fused multiply-adds.
#pragma once
#include <array>
#include <cstdint>
#include <utility>

#include "vector.h"

constexpr int HIGH = LANES == 16 ? 12 : 6, WIDE = 2 * LANES;

struct Run { int64_t offset, length; };  // values of a row that lie together

// Adds a run's products to the sums of P rows and V vectors. Loops over the sums are unrolled early, so that the compiler
// keeps no copy of them in memory.
template <int P, int V>
static void sum_tile(const float* const* rows, const Run& run, const float* weights, float* out) {
  Vector sum[P * V];
  const float* x[P];
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) x[p] = rows[p] + run.offset;
#pragma GCC unroll 32
  for (int i = 0; i < P * V; ++i) sum[i] = load(out + i / V * WIDE + i % V * LANES);
  for (int64_t k = 0; k < run.length; ++k, weights += V * LANES) {
    Vector w[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) w[v] = load(weights + v * LANES);
#pragma GCC unroll 32
    for (int i = 0; i < P * V; ++i) sum[i] += w[i % V] * x[i / V][k];
  }
#pragma GCC unroll 32
  for (int i = 0; i < P * V; ++i) store(out + i / V * WIDE + i % V * LANES, sum[i]);
}

using Tile = void (*)(const float* const*, const Run&, const float*, float*);
template <int V, int... P>
constexpr std::array<Tile, HIGH> tiles(std::integer_sequence<int, P...>) {
  return {sum_tile<P + 1, V>...};
}
constexpr std::array<Tile, HIGH> TILES[2] = {tiles<1>(std::make_integer_sequence<int, HIGH>{}),
                                               tiles<2>(std::make_integer_sequence<int, HIGH>{})};

// How many vectors so many columns take.
inline int vectors(int64_t columns) { return columns > LANES ? 2 : 1; }
