// The weight gradient of a convolution whose input x is known only as its k x k block averages p: with
// x[y, x] = p[y / k, x / k], the sum over pixels becomes one over blocks,
//
//   dW[o, c, u, v] = sum over n, a, b of G[o, u, v][n, a, b] p[n, c, a, b]
//   G[o, u, v][n, a, b] = sum of grad[n, o, i, j] over the output pixels whose tap (u, v) reads block (a, b)
//
// which is a matrix product with 1 / k^2 of the multiply-adds. A thread has output channels of its own and goes through
// the batch a sample at a time: G of that sample stays in its cache, none waits for another, and the order of a sum does
// not depend on how many there are.
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <vector>

#include "conv.h"
#include "core.h"
#include "pooling.h"
#include "tile.h"

namespace {

struct Taps {  // of a convolution along one axis: the pixels that output 0 reads, and how far the next output is
  int64_t count, stride;
  const int64_t* first;
};

// The outputs whose tap reads a pixel of [from, to).
inline void outputs(const Taps& taps, int64_t tap, int64_t from, int64_t to, int64_t most, int64_t* range) {
  range[0] = std::min(most, std::max<int64_t>(0, ceil_div(from - taps.first[tap], taps.stride)));
  range[1] = std::max(range[0], std::min(most, ceil_div(to - taps.first[tap], taps.stride)));
}

struct Sizes {
  int64_t samples, channels, inputs;  // of the gradient, and of the averages
  int64_t out_height, out_width, height, width, k;
  Taps rows, columns;
  int64_t lead, line;  // a row of the gradient with the zeros before and after it that some tap reads; its floats
  int64_t band, own;   // rows of blocks at a time, where k x k neighbours read a block for every tap, else 0; floats
};

// The outputs that read each block, [taps][blocks][2], for the rows and then for the columns.
void all_outputs(const Taps& taps, int64_t size, int64_t k, int64_t most, int64_t* ranges) {
  const int64_t blocks = ceil_div(size, k);
  for (int64_t tap = 0; tap < taps.count; ++tap)
    for (int64_t b = 0; b < blocks; ++b)
      outputs(taps, tap, b * k, std::min(size, (b + 1) * k), most, ranges + 2 * (tap * blocks + b));
}

// One channel of one sample: sums[u][v][a][b].
template <class T>
void sum_blocks(const T* grad, const Sizes& s, const int64_t* rows, const int64_t* columns, float* line, float* sums) {
  const int64_t high = ceil_div(s.height, s.k), wide = ceil_div(s.width, s.k);
  float* row_sums = line + s.lead;
  for (int64_t u = 0; u < s.rows.count; ++u) {
    for (int64_t a = 0; a < high; ++a) {
      const int64_t* i = rows + 2 * (u * high + a);
      std::fill(line, line + s.line, 0.0f);
      for (int64_t row = i[0]; row < i[1]; ++row) add_row(grad + row * s.out_width, s.out_width, row_sums);
      for (int64_t v = 0; v < s.columns.count; ++v) {
        float* out = sums + ((u * s.columns.count + v) * high + a) * wide;
        const int64_t* j = columns + 2 * v * wide;
        for (int64_t b = 0; b < wide; ++b, j += 2) {
          float sum = 0;
          for (int64_t column = j[0]; column < j[1]; ++column) sum += row_sums[column];
          out[b] = sum;
        }
      }
    }
  }
}

template <class T>
void widen_row(const T* row, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += LANES) {
    const int lanes = static_cast<int>(std::min<int64_t>(LANES, count - i));
    store_part(to + i, load_part(row + i, lanes), lanes);
  }
}

void add_both(const float* p, const float* q, int64_t count, float* sums) {
  for (int64_t i = 0; i < count; i += LANES) {
    const int lanes = static_cast<int>(std::min<int64_t>(LANES, count - i));
    store_part(sums + i, load_part(p + i, lanes) + load_part(q + i, lanes), lanes);
  }
}

// The same where each block is read by k x k neighbours: the sums of k neighbours in a row serve all taps u. Rows of the
// gradient are kept by their number modulo k, [v][row % k][row / k][b], so that the rows t of all blocks lie together:
// a tap sums k of these planes, each by whole vectors whatever the width.
template <class T>
void sum_blocks_by_rows(const T* grad, const Sizes& s, float* own, float* sums) {
  const int64_t k = s.k, high = s.height / k, wide = s.width / k, V = s.columns.count;
  const auto [least, most] = std::minmax_element(s.rows.first, s.rows.first + s.rows.count);
  const int64_t before = ceil_div(*most, k), after = ceil_div(-*least, k);  // rows of blocks around a band
  float *line = own, *kept = own + s.line;
  std::fill(line, line + s.line, 0.0f);
  for (int64_t first = 0; first < high; first += s.band) {
    const int64_t blocks = std::min(s.band, high - first), count = blocks + before + after, plane = count * wide;
    for (int64_t i = 0; i < count * k; ++i) {
      const int64_t row = (first - before) * k + i;
      float* to = kept + (i % k) * plane + i / k * wide;
      const bool inside = row >= 0 && row < s.out_height;
      if (inside) widen_row(grad + row * s.out_width, s.out_width, line + s.lead);
      for (int64_t v = 0; v < V; ++v, to += k * plane) {
        if (inside) sum_runs(line + s.lead - s.columns.first[v], k, wide, to);
        else std::fill(to, to + wide, 0.0f);
      }
    }
    for (int64_t u = 0; u < s.rows.count; ++u)
      for (int64_t v = 0; v < V; ++v) {
        float* out = sums + ((u * V + v) * high + first) * wide;
        const auto rows = [&](int64_t t) {
          const int64_t i = before * k - s.rows.first[u] + t;
          return kept + (v * k + i % k) * plane + i / k * wide;
        };
        if (k == 1) widen_row(rows(0), blocks * wide, out);
        else add_both(rows(0), rows(1), blocks * wide, out);
        for (int64_t t = 2; t < k; ++t) add_row(rows(t), blocks * wide, out);
      }
  }
}

// Which of the kinds of reading each tap of the kernel has.
struct Kinds { std::vector<int64_t> rows, columns; };

template <class T>
struct Work {
  Sizes s;
  const T* grad;
  conv::Source<T> averages;
  const int64_t *rows, *columns;  // the outputs that read each block, by `all_outputs`

  int64_t taps() const { return s.rows.count * s.columns.count; }
  int64_t blocks() const { return averages.map.height * averages.map.width; }
  int64_t width() const { return (s.inputs + WIDE - 1) / WIDE * WIDE; }  // of a row of sums

  // The sums [channel taps][width] of output channels [first, last), over the whole batch.
  void sum_channels(int64_t first, int64_t last, float* own, float* sums) const {
    const int64_t high = (last - first) * taps();
    float *packed = own + s.own, *G = packed + blocks() * WIDE;
    std::fill(sums, sums + high * width(), 0.0f);
    std::fill(packed, G, 0.0f);  // lanes without a channel
    for (int64_t n = 0; n < s.samples; ++n) {
      for (int64_t o = first; o < last; ++o) {
        const T* from = grad + (n * s.channels + o) * s.out_height * s.out_width;
        float* to = G + (o - first) * taps() * blocks();
        if (s.band) sum_blocks_by_rows(from, s, own, to);
        else sum_blocks(from, s, rows, columns, own, to);
      }
      for (int64_t c = 0; c < s.inputs; c += WIDE) {
        const int64_t channels = std::min<int64_t>(WIDE, s.inputs - c), V = vectors(channels);
        const conv::Map& map = averages.map;
        fill_band(averages, n, conv::Band{packed, 0, map.height, 0, map.width, c, channels, V * LANES});
        for (int64_t r = 0; r < high; r += HIGH)
          multiply(G + r * blocks(), std::min<int64_t>(HIGH, high - r), V, packed, sums + r * width() + c);
      }
    }
  }

  // Adds the products of some rows of G with the averages of one sample.
  void multiply(const float* G, int64_t count, int64_t V, const float* packed, float* sums) const {
    alignas(64) float products[HIGH * WIDE] = {};  // of one sample first: long sums lose digits
    const float* from[HIGH];
    for (int64_t i = 0; i < count; ++i) from[i] = G + i * blocks();
    TILES[V - 1][count - 1](from, {0, blocks()}, packed, products);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t v = 0; v < V; ++v) {
        float* to = sums + i * width() + v * LANES;
        store(to, load(to) + load(products + i * WIDE + v * LANES));
      }
  }

  // Writes (or adds) the sums of output channels [first, last) to their weights [channel][input][u][v].
  template <class W>
  void finish(int64_t first, int64_t last, const float* sums, const Kinds& kinds, bool accumulate, W* out) const {
    for (int64_t o = first; o < last; ++o, sums += taps() * width()) {
      W* to = out + o * s.inputs * kinds.rows.size() * kinds.columns.size();
      for (int64_t c = 0; c < s.inputs; ++c)
        for (const int64_t row : kinds.rows)
          for (const int64_t column : kinds.columns) {
            const float sum = sums[(row * s.columns.count + column) * width() + c];
            put(to++, accumulate, sum);
          }
    }
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

// `share`: output channels per thread at a time; `scratch`: for each thread `own` floats, a block of packed averages, G
// and sums; `ranges`: two integers for each block of each tap of the rows, and of the columns.
static void pooled_weight_gradient(Address grad, int code, Address averages, bool planar,
                                   const std::array<int64_t, 14>& sizes, const std::vector<int64_t>& rows_first,
                                   const std::vector<int64_t>& rows_kinds, const std::vector<int64_t>& columns_first,
                                   const std::vector<int64_t>& columns_kinds, Address out, int out_code,
                                   bool accumulate, int64_t share, Address scratch, Address ranges, int threads) {
  const auto& z = sizes;
  const Sizes s{z[0], z[1], z[2], z[3], z[4], z[5], z[6], z[7],
                {static_cast<int64_t>(rows_first.size()), z[8], rows_first.data()},
                {static_cast<int64_t>(columns_first.size()), z[9], columns_first.data()}, z[10], z[11], z[12], z[13]};
  const conv::Map map{s.samples, s.inputs, ceil_div(s.height, s.k), ceil_div(s.width, s.k), planar};
  int64_t *rows = at<int64_t>(ranges), *columns = rows + 2 * s.rows.count * map.height;
  all_outputs(s.rows, s.height, s.k, s.out_height, rows);
  all_outputs(s.columns, s.width, s.k, s.out_width, columns);
  const Kinds kinds{rows_kinds, columns_kinds};
  with_storage(code, [&](auto kind) {
    using T = decltype(kind);
    const Work<T> work{s, at<T>(grad), {map, at<T>(averages), nullptr, nullptr, false}, rows, columns};
    const int64_t G = share * work.taps() * work.blocks(), sums = share * work.taps() * work.width();
    const int64_t each = s.own + work.blocks() * WIDE + G + sums, parts = ceil_div(s.channels, share);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t part = 0; part < parts; ++part) {
      float *own = at<float>(scratch) + omp_get_thread_num() * each, *summed = own + each - sums;
      const int64_t first = part * share, last = std::min(first + share, s.channels);
      work.sum_channels(first, last, own, summed);
      with_storage(out_code, [&](auto out_kind) {
        work.finish(first, last, summed, kinds, accumulate, at<decltype(out_kind)>(out));
      });
    }
  });
}

void bind_pooling_weight(nb::module_& m) { m.def("pooled_weight_gradient", &pooled_weight_gradient, Release()); }
