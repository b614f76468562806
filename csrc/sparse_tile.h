// The inner loops: a tile is up to eight consecutive vectors (64 pixels) of one output channel, held in registers while
// the nonzeros of its line go by, so that a nonzero costs one load and one multiply-add for each vector.
#pragma once
#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "sparse_blocks.h"

// Tiles are arrays that must stay in registers, so whatever takes one is expanded in place.
#define ALWAYS_INLINE inline __attribute__((always_inline))

typedef float Unaligned __attribute__((vector_size(32), aligned(4)));
typedef float Quarter __attribute__((vector_size(16)));

// Four floats in both halves of a vector.
ALWAYS_INLINE Vector load_twice(const float* p) {
#if defined(__AVX__)
  Vector twice;  // written out: from the intrinsic, too, compilers make a load for each of the four
  asm("vbroadcastf128 %1, %0" : "=x"(twice) : "m"(*reinterpret_cast<const Quarter*>(p)));
  return twice;
#else
  Quarter four;
  std::memcpy(&four, p, sizeof four);
  return __builtin_shufflevector(four, four, 0, 1, 2, 3, 0, 1, 2, 3);
#endif
}

// sum += weight * source. Two loads in one cycle must not meet in the same half of their cache lines, so neighbours are
// loaded one after the other: compilers would change the order.
ALWAYS_INLINE void multiply_add(Vector& sum, Vector weight, const Unaligned* source) {
#if defined(__FMA__)
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(weight), "m"(*source));
#else
  sum += weight * *source;
#endif
}

ALWAYS_INLINE Vector multiply(Vector weight, const Unaligned* source) {
#if defined(__FMA__)
  Vector product;
  asm volatile("vmulps %2, %1, %0" : "=x"(product) : "x"(weight), "m"(*source));
  return product;
#else
  return weight * *source;
#endif
}

// The address is made once: adding an index in each of the loads is slower.
ALWAYS_INLINE const Unaligned* source_at(const char* base, uint64_t offset) {
  base += offset;
  asm("" : "+r"(base));
  return reinterpret_cast<const Unaligned*>(base);
}

template <int NV>
ALWAYS_INLINE void add_scaled(Vector (&sum)[NV], Vector weight, const Unaligned* source) {
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) multiply_add(sum[v], weight, source + v);
}

// Adds the entries [entry, end) and moves `entry` to the end. Loads limit this loop, not arithmetic: four weights come
// in one, and four offsets in two.
template <int NV>
ALWAYS_INLINE void accumulate(Vector (&sum)[NV], const Blocks& blocks, int64_t& entry, int64_t end, const char* base) {
  const int32_t* offsets = blocks.offsets;
  const float* weights = blocks.weights;
  for (; entry < end; entry += UNROLL) {
    uint64_t near, far;
    std::memcpy(&near, offsets + entry, 8);
    std::memcpy(&far, offsets + entry + 2, 8);
    const Vector four = load_twice(weights + entry);
    add_scaled(sum, __builtin_shufflevector(four, four, 0, 0, 0, 0, 4, 4, 4, 4), source_at(base, near & UINT32_MAX));
    add_scaled(sum, __builtin_shufflevector(four, four, 1, 1, 1, 1, 5, 5, 5, 5), source_at(base, near >> 32));
    add_scaled(sum, __builtin_shufflevector(four, four, 2, 2, 2, 2, 6, 6, 6, 6), source_at(base, far & UINT32_MAX));
    add_scaled(sum, __builtin_shufflevector(four, four, 3, 3, 3, 3, 7, 7, 7, 7), source_at(base, far >> 32));
  }
}

template <int NV>
ALWAYS_INLINE void add_tile(Vector (&sum)[NV], const float* floats) {
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) sum[v] += load(floats + LANES * v);
}
template <int NV>
ALWAYS_INLINE void add_to_tile(Vector (&sum)[NV], float value) {
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) sum[v] += broadcast(value);
}
template <class T, int NV>
ALWAYS_INLINE void load_tile(Vector (&tile)[NV], const T* from) {
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) tile[v] = load(from + LANES * v);
}
template <class T, int NV>
ALWAYS_INLINE void keep_tile(const Vector (&tile)[NV], T* to) {
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) store(to + LANES * v, tile[v]);
}

// Maps often lie beyond all caches, and channels too far apart for the machine to guess the next.
template <int NV, bool WRITE, class T>
ALWAYS_INLINE void prefetch_tile(const T* at) {
#pragma GCC unroll 8
  for (int i = 0; i < LANES * NV; i += 64 / sizeof(T)) __builtin_prefetch(at + i, WRITE);
}

// Every row of V vectors moved by one pixel; a zero comes in at its edge.
template <int V, int NV>
ALWAYS_INLINE void move_right(Vector (&moved)[NV], const Vector (&tile)[NV]) {
#pragma GCC unroll 8
  for (int v = NV - 1; v >= 0; --v) {  // from the end: `moved` may be `tile`
    const Vector before = v % V ? tile[v - 1] : Vector{};
    moved[v] = __builtin_shufflevector(before, tile[v], 7, 8, 9, 10, 11, 12, 13, 14);
  }
}
template <int V, int NV>
ALWAYS_INLINE void move_left(Vector (&moved)[NV], const Vector (&tile)[NV]) {
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) {
    const Vector after = (v + 1) % V ? tile[v + 1] : Vector{};
    moved[v] = __builtin_shufflevector(tile[v], after, 1, 2, 3, 4, 5, 6, 7, 8);
  }
}

ALWAYS_INLINE Quarter lower(Vector v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3); }
ALWAYS_INLINE Quarter upper(Vector v) {
#if defined(__AVX__)
  return _mm256_extractf128_ps(v, 1);  // compilers would move both halves
#else
  return __builtin_shufflevector(v, v, 4, 5, 6, 7);
#endif
}

// (a, b) -> a0 + a2, b0 + b2, a1 + a3, b1 + b3, ...
ALWAYS_INLINE Vector add_apart(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
}

// The product of a tile with the source, summed over whole vectors; two sums, for the scheduler is too short for a
// chain of eight.
template <int NV>
ALWAYS_INLINE Vector multiply_sum(const Vector (&tile)[NV], const Unaligned* source) {
  Vector even = multiply(tile[0], source), odd{};
  if (NV > 1) odd = multiply(tile[1], source + 1);
#pragma GCC unroll 8
  for (int v = 2; v < NV; ++v) {
    if (v % 2) multiply_add(odd, tile[v], source + v);
    else multiply_add(even, tile[v], source + v);
  }
  return even + odd;
}

// sums[e] += the product of a tile with the source at offsets[e], summed over the pixels, for e in [entry, end).
template <int NV>
ALWAYS_INLINE void dot(const Vector (&tile)[NV], const int32_t* offsets, int64_t entry, int64_t end, const char* base,
                  float* sums) {
  for (; entry < end; entry += UNROLL) {
    uint64_t near, far;
    std::memcpy(&near, offsets + entry, 8);
    std::memcpy(&far, offsets + entry + 2, 8);
    const Vector first = multiply_sum(tile, source_at(base, near & UINT32_MAX));
    const Vector second = multiply_sum(tile, source_at(base, near >> 32));
    const Vector low = add_apart(first, second);
    const Vector third = multiply_sum(tile, source_at(base, far & UINT32_MAX));
    const Vector fourth = multiply_sum(tile, source_at(base, far >> 32));
    const Vector high = add_apart(third, fourth);
    // lanes 0-3 and 4-7 each hold a half of the four sums
    const Vector halves = __builtin_shufflevector(low, high, 0, 1, 8, 9, 4, 5, 12, 13) +
                          __builtin_shufflevector(low, high, 2, 3, 10, 11, 6, 7, 14, 15);
    Quarter sum;
    std::memcpy(&sum, sums + entry, sizeof sum);
    sum += lower(halves) + upper(halves);
    std::memcpy(sums + entry, &sum, sizeof sum);
  }
}
