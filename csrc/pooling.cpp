// Averages of k x k pixels.
#include <algorithm>

#include "core.h"
#include "vector.h"

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

struct Plane {  // a map in memory: [height, width, inner]; inner is 1, or the channels of a channels_last map
  int64_t height, width, inner;
};

template <class T>
static void pool_plane(const T* x, Plane in, int64_t k, T* out, float* sums) {
  const int64_t high = divide_up(in.height, k), wide = divide_up(in.width, k), line = in.width * in.inner;
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
  const int64_t wide = divide_up(width, k), pooled = divide_up(height, k) * wide * inner;
  with_storage(code, [&](auto kind) {
    using T = decltype(kind);
#pragma omp parallel for num_threads(threads)
    for (int64_t p = 0; p < planes; ++p) {
      pool_plane(at<T>(x) + p * apart, in, k, at<T>(out) + p * pooled, at<float>(scratch) + omp_get_thread_num() * own);
    }
  });
}

void bind_pooling(nb::module_& m) { m.def("pool", &pool, Release()); }
