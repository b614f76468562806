// Averages of k x k pixels, and what the weight gradient of a convolution needs of them: with x known only as its block
// averages p, x[y, x] = p[y / k, x / k], the sum over pixels becomes one over blocks,
//
//   dW[o, c, u, v] = sum over n, a, b of G[o, u, v][n, a, b] p[n, c, a, b]
//   G[o, u, v][n, a, b] = sum of grad[n, o, i, j] over the output pixels whose tap (u, v) reads block (a, b)
//
// which is a matrix product with 1 / k^2 of the multiply-adds. `block_sums` makes G.
#include "core.h"
#include "vector.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <vector>

struct Plane {  // a map in memory: [height, width, inner]; inner is 1, or the channels of a channels_last map
  int64_t height, width, inner;
};

static inline int64_t ceil_div(int64_t a, int64_t b) { return a >= 0 ? (a + b - 1) / b : -(-a / b); }

template <class T>
static void add_row(const T* row, int64_t count, float* sums) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(sums + i, load(sums + i) + load(row + i));
  if (i < count) store_part(sums + i, load_part(sums + i, count - i) + load_part(row + i, count - i), count - i);
}

// The sums of `count` runs of k numbers, one run after another; k known to the compiler makes it vectors.
template <int K>
static void sum_runs(const float* p, int64_t count, float* sums) {
  for (int64_t i = 0; i < count; ++i) {
    float sum = 0;
    for (int t = 0; t < K; ++t) sum += p[i * K + t];
    sums[i] = sum;
  }
}
static void sum_runs(const float* p, int64_t k, int64_t count, float* sums) {
  if (k == 2) return sum_runs<2>(p, count, sums);
  if (k == 4) return sum_runs<4>(p, count, sums);
  if (k == 8) return sum_runs<8>(p, count, sums);
  for (int64_t i = 0; i < count; ++i) {
    float sum = 0;
    for (int64_t t = 0; t < k; ++t) sum += p[i * k + t];
    sums[i] = sum;
  }
}

template <class T>
static void pool_plane(const T* x, Plane in, int64_t k, T* out, float* sums) {
  const int64_t high = ceil_div(in.height, k), wide = ceil_div(in.width, k), line = in.width * in.inner;
  float* averages = sums + line;
  for (int64_t a = 0; a < high; ++a) {
    const int64_t rows = std::min(k, in.height - a * k);
    std::fill(sums, sums + line, 0.0f);
    for (int64_t r = 0; r < rows; ++r) add_row(x + (a * k + r) * line, line, sums);
    const int64_t whole = in.inner == 1 ? in.width / k : 0;
    sum_runs(sums, k, whole, averages);
    const float whole_share = 1.0f / static_cast<float>(rows * k);
    for (int64_t b = 0; b < whole; ++b) averages[b] *= whole_share;
    for (int64_t b = whole; b < wide; ++b) {
      const int64_t columns = std::min(k, in.width - b * k);
      const float share = 1.0f / static_cast<float>(rows * columns);
      for (int64_t c = 0; c < in.inner; ++c) {
        float sum = 0;
        for (int64_t t = 0; t < columns; ++t) sum += sums[(b * k + t) * in.inner + c];
        averages[b * in.inner + c] = sum * share;
      }
    }
    const int64_t count = wide * in.inner;
    for (int64_t i = 0; i < count; i += LANES) {
      const int lanes = static_cast<int>(std::min<int64_t>(LANES, count - i));
      store_part(out + a * count + i, load_part(averages + i, lanes), lanes);
    }
  }
}

// Planes of x are `apart` elements from each other. `scratch`: `own` floats for each thread, at least a row of x and of
// averages.
static void pool(Address x, int code, int64_t planes, int64_t apart, int64_t height, int64_t width, int64_t inner,
                 int64_t k, Address out, Address scratch, int64_t own, int threads) {
  const Plane in{height, width, inner};
  const int64_t wide = ceil_div(width, k), pooled = ceil_div(height, k) * wide * inner;
  with_storage(code, [&](auto kind) {
    using T = decltype(kind);
#pragma omp parallel for num_threads(threads)
    for (int64_t p = 0; p < planes; ++p) {
      pool_plane(at<T>(x) + p * apart, in, k, at<T>(out) + p * pooled, at<float>(scratch) + omp_get_thread_num() * own);
    }
  });
}

struct Taps {  // of a convolution along one axis: the pixels that output 0 reads, and how far the next output is
  int64_t count, stride;
  const int64_t* first;
};

// The outputs whose tap reads a pixel of [from, to).
static inline void outputs(const Taps& taps, int64_t tap, int64_t from, int64_t to, int64_t most, int64_t* range) {
  range[0] = std::min(most, std::max<int64_t>(0, ceil_div(from - taps.first[tap], taps.stride)));
  range[1] = std::max(range[0], std::min(most, ceil_div(to - taps.first[tap], taps.stride)));
}

struct Sizes {
  int64_t samples, channels, first, count;  // of the gradient; [first, first + count) of its channels are read
  int64_t out_height, out_width, height, width, k;
  Taps rows, columns;
  int64_t lead, line;  // a row of the gradient with the zeros before and after it that some tap reads; its floats

  // Whether the outputs that read a block are k neighbours, for every tap: then they are summed by vectors.
  bool runs() const { return columns.stride == 1 && width % k == 0; }
};

// The outputs that read each block, [taps][blocks][2], for the rows and then for the columns.
static void all_outputs(const Taps& taps, int64_t size, int64_t k, int64_t most, int64_t* ranges) {
  const int64_t blocks = ceil_div(size, k);
  for (int64_t tap = 0; tap < taps.count; ++tap)
    for (int64_t b = 0; b < blocks; ++b)
      outputs(taps, tap, b * k, std::min(size, (b + 1) * k), most, ranges + 2 * (tap * blocks + b));
}

// One channel of one sample: sums[u][v][a][b], `stride` floats from one tap to the next.
template <class T>
static void sum_blocks(const T* grad, const Sizes& s, const int64_t* rows, const int64_t* columns, float* line,
                       float* sums, int64_t stride) {
  const int64_t high = ceil_div(s.height, s.k), wide = ceil_div(s.width, s.k);
  float* row_sums = line + s.lead;
  for (int64_t u = 0; u < s.rows.count; ++u) {
    for (int64_t a = 0; a < high; ++a) {
      const int64_t* i = rows + 2 * (u * high + a);
      std::fill(line, line + s.line, 0.0f);
      for (int64_t row = i[0]; row < i[1]; ++row) add_row(grad + row * s.out_width, s.out_width, row_sums);
      for (int64_t v = 0; v < s.columns.count; ++v) {
        float* out = sums + (u * s.columns.count + v) * stride + a * wide;
        if (s.runs()) {
          sum_runs(row_sums - s.columns.first[v], s.k, wide, out);
          continue;
        }
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

// out [count taps, samples blocks]; `scratch`: for each thread a row of the gradient with its zeros; `ranges`: two
// integers for each block of each tap of the rows, and of the columns.
static void block_sums(Address grad, int code, const std::array<int64_t, 13>& sizes,
                       const std::vector<int64_t>& rows_first, const std::vector<int64_t>& columns_first, Address out,
                       Address scratch, Address ranges, int threads) {
  const auto& z = sizes;
  const Sizes s{z[0], z[1], z[2], z[3], z[4], z[5], z[6], z[7], z[8],
                {static_cast<int64_t>(rows_first.size()), z[9], rows_first.data()},
                {static_cast<int64_t>(columns_first.size()), z[10], columns_first.data()}, z[11], z[12]};
  const int64_t high = ceil_div(s.height, s.k), wide = ceil_div(s.width, s.k), blocks = high * wide;
  const int64_t taps = s.rows.count * s.columns.count;
  const int64_t plane = s.out_height * s.out_width, stride = s.samples * blocks;
  int64_t *rows = at<int64_t>(ranges), *columns = rows + 2 * s.rows.count * high;
  all_outputs(s.rows, s.height, s.k, s.out_height, rows);
  all_outputs(s.columns, s.width, s.k, s.out_width, columns);
  with_storage(code, [&](auto kind) {
    using T = decltype(kind);
#pragma omp parallel for collapse(2) num_threads(team(threads, s.samples * s.count * plane))
    for (int64_t o = 0; o < s.count; ++o)
      for (int64_t n = 0; n < s.samples; ++n) {
        float* own = at<float>(scratch) + omp_get_thread_num() * s.line;
        const T* from = at<T>(grad) + (n * s.channels + s.first + o) * plane;
        sum_blocks(from, s, rows, columns, own, at<float>(out) + o * taps * stride + n * blocks, stride);
      }
  });
}

void bind_pooling(nb::module_& m) {
  m.def("pool", &pool, Release());
  m.def("block_sums", &block_sums, Release());
}
