// Sums of rows and of runs of neighbours, which averages and their weight gradient share.
#pragma once
#include <cstdint>

#include "vector.h"

inline int64_t ceil_div(int64_t a, int64_t b) { return a >= 0 ? (a + b - 1) / b : -(-a / b); }

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
