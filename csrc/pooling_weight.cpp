// The weight gradient of a convolution whose input x is known only as its k x k block averages p: with
// x[y, x] = p[y / k, x / k], the sum over pixels becomes one over blocks,
//
//   dW[o, c, u, v] = sum over n, a, b of p[n, a, b, c] G[u, v][n, a, b, o]
//   G[u, v][n, a, b, o] = sum of grad[n, o, i, j] over the output pixels whose tap (u, v) reads block (a, b)
//
// which is a matrix product with 1 / k^2 of the multiply-adds. The gradient and the averages come as bands (conv.h),
// pixels outside and channels inside whatever their layout: sums over blocks are whole vectors of output channels, and
// the average of an input channel is the value that a tile multiplies them with (pairs.h). A thread has output channels
// of its own, and G of some rows of blocks for the taps of one row of the kernel, which stays in its cache: none waits
// for another, and the order of a sum does not depend on how many there are.
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "conv.h"
#include "core.h"
#include "pairs.h"

namespace {

struct Taps {  // of a convolution along one axis: the pixels that output 0 reads, and how far the next output is
  int64_t count, stride;
  const int64_t* first;
};

// The outputs [begin, end) that read each block, [taps][blocks].
struct Range { int64_t begin, end; };
void find_readers(const Taps& taps, int64_t size, int64_t k, int64_t most, Range* ranges) {
  for (int64_t tap = 0; tap < taps.count; ++tap)
    for (int64_t from = 0; from < size; from += k) {
      const auto output = [&](int64_t pixel) { return divide_up(pixel - taps.first[tap], taps.stride); };
      const int64_t begin = std::clamp<int64_t>(output(from), 0, most);
      *ranges++ = {begin, std::clamp<int64_t>(output(std::min(size, from + k)), begin, most)};
    }
}

// The sizes, in the order in which kernels/pooling.py passes them.
struct Sizes {
  int64_t samples, channels, inputs;  // of the gradient, and of the averages
  int64_t out_height, out_width, height, width, k, stride_y, stride_x;
  int64_t share, band, most;  // output channels and rows of blocks at a time, and the most rows that read these
};

template <class T>
struct Work {
  Sizes s;
  conv::Source<T> grad, averages;
  int64_t U, V;                 // rows and columns of the kernel
  const Range *rows, *columns;  // the outputs that read each block

  int64_t blocks() const { return s.band * averages.map.width; }
  int64_t wides() const { return divide_up(s.share, WIDE); }

  // The floats of a thread: gradients [wide][row][output][WIDE], a line of their sums [wide][output][WIDE], averages
  // [block][input], G [v][wide][block][WIDE], and sums [tap][wide][input][WIDE].
  int64_t grads() const { return wides() * s.most * s.out_width * WIDE; }
  int64_t line() const { return wides() * s.out_width * WIDE; }
  int64_t packed() const { return blocks() * s.inputs; }
  int64_t G() const { return V * wides() * blocks() * WIDE; }
  int64_t sums() const { return U * V * wides() * s.inputs * WIDE; }

  // The sums of output channels [first, first + channels), over the whole batch.
  void sum_channels(int64_t first, int64_t channels, float* own) const {
    const int64_t high = averages.map.height, wide = averages.map.width;
    float *line_ = own + grads(), *packed_ = line_ + line(), *G_ = packed_ + packed(), *sums_ = G_ + G();
    std::fill(own, line_, 0.0f);  // lanes without a channel
    std::fill(sums_, sums_ + sums(), 0.0f);
    for (int64_t n = 0; n < s.samples; ++n)
      for (int64_t a = 0; a < high; a += s.band) {
        const int64_t count = std::min(s.band, high - a);
        const Range read = readers(a, count);
        for (int64_t c = 0; c < channels; c += WIDE)
          fill_band(grad, n, conv::Band{own + c * s.most * s.out_width, read.begin, read.end - read.begin, 0,
                                        s.out_width, first + c, std::min<int64_t>(WIDE, channels - c), WIDE});
        fill_band(averages, n, conv::Band{packed_, a, count, 0, wide, 0, s.inputs, s.inputs});
        for (int64_t u = 0; u < U; ++u) {
          for (int64_t i = 0; i < count; ++i) {
            const Range of = rows[u * high + a + i];
            sum_rows(own, {of.begin - read.begin, of.end - read.begin}, channels, line_);
            sum_columns(line_, channels, G_ + i * wide * WIDE);
          }
          multiply(packed_, G_, channels, count * wide, sums_ + u * V * wides() * s.inputs * WIDE);
        }
      }
  }

  // The outputs that read `count` rows of blocks for any tap.
  Range readers(int64_t a, int64_t count) const {
    Range all{s.out_height, 0};
    for (int64_t u = 0; u < U; ++u)
      for (int64_t i = a; i < a + count; ++i) {
        const Range of = rows[u * averages.map.height + i];
        if (of.begin < of.end) all = {std::min(all.begin, of.begin), std::max(all.end, of.end)};
      }
    return all.begin < all.end ? all : Range{0, 0};
  }

  // The sum of some rows of the gradient.
  void sum_rows(const float* grads, Range range, int64_t channels, float* line) const {
    const int64_t row = s.out_width * WIDE;
    for (int64_t c = 0; c < channels; c += WIDE, grads += s.most * row)
      for (int64_t j = 0; j < s.out_width; ++j, line += WIDE)
        for (int64_t lane = 0; lane < vectors(channels - c) * LANES; lane += LANES) {
          Vector sum = {};
          for (int64_t i = range.begin; i < range.end; ++i) sum += load(grads + i * row + j * WIDE + lane);
          store(line + lane, sum);
        }
  }

  // The sums of neighbours in such a line, for each tap of the columns.
  void sum_columns(const float* line, int64_t channels, float* G) const {
    const int64_t wide = averages.map.width;
    for (int64_t v = 0; v < V; ++v, G += wides() * blocks() * WIDE)
      for (int64_t c = 0; c < channels; c += LANES) {
        const float* from = line + c / WIDE * s.out_width * WIDE + c % WIDE;
        float* to = G + c / WIDE * blocks() * WIDE + c % WIDE;
        for (int64_t b = 0; b < wide; ++b) {
          const Range of = columns[v * wide + b];
          Vector sum = {};
          for (int64_t j = of.begin; j < of.end; ++j) sum += load(from + j * WIDE);
          store(to + b * WIDE, sum);
        }
      }
  }

  // Adds the products of `count` blocks for the taps of one row of the kernel.
  void multiply(const float* packed, const float* G, int64_t channels, int64_t count, float* sums) const {
    std::array<int64_t, HIGH> inputs;
    std::iota(inputs.begin(), inputs.end(), 0);
    const Outputs outputs{1, 1, count, 0, 0, s.inputs};
    for (int64_t v = 0; v < V; ++v)
      for (int64_t wide = 0; wide < wides(); ++wide, G += blocks() * WIDE)
        for (int64_t c = 0; c < s.inputs; c += HIGH) {
          const int64_t few = std::min<int64_t>(HIGH, s.inputs - c), of = channels - wide * WIDE;
          if (of > 0) PAIRS[vectors(of) - 1][few - 1](packed + c, inputs.data(), G, outputs, sums);
          sums += few * WIDE;
        }
  }

  // Writes (or adds) the sums of such channels to their weights [channel][input][u][v]; `rows_kinds` and `columns_kinds`
  // have the kind of reading of each tap.
  template <class W>
  void finish(int64_t first, int64_t channels, const float* sums, const std::vector<int64_t>& rows_kinds,
              const std::vector<int64_t>& columns_kinds, bool accumulate, W* out) const {
    W* to = out + first * s.inputs * rows_kinds.size() * columns_kinds.size();
    for (int64_t o = 0; o < channels; ++o)
      for (int64_t c = 0; c < s.inputs; ++c)
        for (const int64_t row : rows_kinds)
          for (const int64_t column : columns_kinds)
            put(to++, accumulate, sums[(((row * V + column) * wides() + o / WIDE) * s.inputs + c) * WIDE + o % WIDE]);
  }
  template <class W>
  static void put(W* to, bool accumulate, float sum) {
    W all[LANES];
    store(all, broadcast(accumulate ? widen(*to) + sum : sum));
    *to = all[0];
  }
  static void put(float* to, bool accumulate, float sum) { *to = accumulate ? *to + sum : sum; }
};
}  // namespace

// `each`: floats of scratch for a thread, with room between them; `ranges`: two integers for each block of each tap of
// the rows, and of the columns.
static void pooled_weight_gradient(Address grad, int code, bool planar_grad, Address averages, bool planar,
                                   const std::array<int64_t, 13>& sizes, const std::vector<int64_t>& rows_first,
                                   const std::vector<int64_t>& rows_kinds, const std::vector<int64_t>& columns_first,
                                   const std::vector<int64_t>& columns_kinds, Address out, int out_code,
                                   bool accumulate, Address scratch, int64_t each, Address ranges, int threads) {
  const auto& z = sizes;
  const Sizes s{z[0], z[1], z[2], z[3], z[4], z[5], z[6], z[7], z[8], z[9], z[10], z[11], z[12]};
  const Taps y{static_cast<int64_t>(rows_first.size()), s.stride_y, rows_first.data()};
  const Taps x{static_cast<int64_t>(columns_first.size()), s.stride_x, columns_first.data()};
  const conv::Map from{s.samples, s.channels, s.out_height, s.out_width, planar_grad};
  const conv::Map map{s.samples, s.inputs, divide_up(s.height, s.k), divide_up(s.width, s.k), planar};
  Range *rows = at<Range>(ranges), *columns = rows + y.count * map.height;
  find_readers(y, s.height, s.k, s.out_height, rows);
  find_readers(x, s.width, s.k, s.out_width, columns);
  with_storage(code, [&](auto kind) {
    using T = decltype(kind);
    const Work<T> work{s, {from, at<T>(grad), nullptr, nullptr, false}, {map, at<T>(averages), nullptr, nullptr, false},
                       y.count, x.count, rows, columns};
    const int64_t parts = divide_up(s.channels, s.share);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t part = 0; part < parts; ++part) {
      float* own = at<float>(scratch) + omp_get_thread_num() * each;
      const float* sums = own + work.grads() + work.line() + work.packed() + work.G();
      const int64_t first = part * s.share, channels = std::min(s.share, s.channels - first);
      work.sum_channels(first, channels, own);
      with_storage(out_code, [&](auto out_kind) {
        work.finish(first, channels, sums, rows_kinds, columns_kinds, accumulate, at<decltype(out_kind)>(out));
      });
    }
  });
}

void bind_pooling_weight(nb::module_& m) { m.def("pooled_weight_gradient", &pooled_weight_gradient, Release()); }
