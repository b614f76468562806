// How the sparse kernels share their work between threads, and write a sum down.
#pragma once
#include "core.h"
#include "vector.h"

constexpr int64_t TOO_LARGE = -1;  // in place of the bytes of scratch: sizes that the kernels cannot count

struct Range { int64_t begin, end; };

inline Range part(int64_t size, int64_t parts, int64_t i) { return {size * i / parts, size * (i + 1) / parts}; }

// body(i) for i below `parts` on that many threads, however many there are.
template <class Body>
void on_threads(int64_t parts, Body body) {
  const int threads = static_cast<int>(parts);
#pragma omp parallel num_threads(threads)
  for (int i = omp_get_thread_num(); i < threads; i += omp_get_num_threads()) body(i);
}

template <class T>
inline void put(T* out, float sum, bool accumulate) {
  store_part(out, broadcast(accumulate ? widen(*out) + sum : sum), 1);
}
inline void put(float* out, float sum, bool accumulate) { *out = accumulate ? *out + sum : sum; }
