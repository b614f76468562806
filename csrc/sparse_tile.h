// The inner loops: a tile is up to eight consecutive vectors (64 pixels) of one output channel, held in registers while
// the nonzeros of its line go by, so that a nonzero costs one load and one multiply-add for each vector.
#pragma once
#include "sparse_blocks.h"

// Tiles are arrays that must stay in registers, so whatever takes one is expanded in place.
#define IN_PLACE inline __attribute__((always_inline))

typedef float Unaligned __attribute__((vector_size(32), aligned(4)));
typedef float Quarter __attribute__((vector_size(16)));

// Four floats in both halves of a vector.
IN_PLACE Vector load_twice(const float* p) {
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
IN_PLACE void multiply_add(Vector& sum, Vector weight, const Unaligned* source) {
#if defined(__FMA__)
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(weight), "m"(*source));
#else
  sum += weight * *source;
#endif
}

IN_PLACE Vector multiply(Vector weight, const Unaligned* source) {
#if defined(__FMA__)
  Vector product;
  asm volatile("vmulps %2, %1, %0" : "=x"(product) : "x"(weight), "m"(*source));
  return product;
#else
  return weight * *source;
#endif
}

template <int NV>
IN_PLACE void add_scaled(Vector (&sum)[NV], Vector weight, const char* source) {
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) multiply_add(sum[v], weight, reinterpret_cast<const Unaligned*>(source) + v);
}

// Loads limit this loop, not arithmetic: four weights come in one, and four offsets in two.
template <int NV>
IN_PLACE void accumulate(Vector (&sum)[NV], const Blocks& blocks, int32_t entry, int32_t end, const char* base) {
  for (; entry < end; entry += FOUR) {
    uint64_t near, far;
    std::memcpy(&near, blocks.offsets + entry, 8);
    std::memcpy(&far, blocks.offsets + entry + 2, 8);
    const Vector four = load_twice(blocks.weights + entry);
    add_scaled(sum, __builtin_shufflevector(four, four, 0, 0, 0, 0, 4, 4, 4, 4), base + static_cast<uint32_t>(near));
    add_scaled(sum, __builtin_shufflevector(four, four, 1, 1, 1, 1, 5, 5, 5, 5), base + (near >> 32));
    add_scaled(sum, __builtin_shufflevector(four, four, 2, 2, 2, 2, 6, 6, 6, 6), base + static_cast<uint32_t>(far));
    add_scaled(sum, __builtin_shufflevector(four, four, 3, 3, 3, 3, 7, 7, 7, 7), base + (far >> 32));
  }
}

template <int NV>
IN_PLACE void add_tile(Vector (&sum)[NV], const float* tile) {
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) sum[v] += load(tile + LANES * v);
}
template <int NV>
IN_PLACE void keep_tile(const Vector (&sum)[NV], float* tile) {
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) store(tile + LANES * v, sum[v]);
}

// Moves every row of V vectors by one pixel; a zero comes in at its edge.
template <int V, int NV>
IN_PLACE void move_right(Vector (&tile)[NV]) {
#pragma GCC unroll 8
  for (int v = NV - 1; v >= 0; --v) {
    const Vector before = v % V ? tile[v - 1] : Vector{};
    tile[v] = __builtin_shufflevector(before, tile[v], 7, 8, 9, 10, 11, 12, 13, 14);
  }
}
template <int V, int NV>
IN_PLACE void move_left(Vector (&tile)[NV]) {
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) {
    const Vector after = (v + 1) % V ? tile[v + 1] : Vector{};
    tile[v] = __builtin_shufflevector(tile[v], after, 1, 2, 3, 4, 5, 6, 7, 8);
  }
}

// A blend and a swap of lanes instead of two shuffles: shuffles take a port from the multiply-adds.
// (a, b) -> a0 + a1, b0 + b1, a2 + a3, b2 + b3, ...
IN_PLACE Vector add_neighbours(Vector a, Vector b) {
  const Vector swapped = __builtin_shufflevector(a, b, 8, 1, 10, 3, 12, 5, 14, 7);
  return __builtin_shufflevector(a, b, 0, 9, 2, 11, 4, 13, 6, 15) +
         __builtin_shufflevector(swapped, swapped, 1, 0, 3, 2, 5, 4, 7, 6);
}

// The product of a tile with the source, summed over whole vectors; two sums, for the scheduler is too short for a
// chain of eight.
template <int NV>
IN_PLACE Vector multiply_sum(const Vector (&tile)[NV], const char* source) {
  const Unaligned* vectors = reinterpret_cast<const Unaligned*>(source);
  Vector even = multiply(tile[0], vectors), odd{};
  if (NV > 1) odd = multiply(tile[1], vectors + 1);
#pragma GCC unroll 8
  for (int v = 2; v < NV; ++v) {
    if (v % 2) multiply_add(odd, tile[v], vectors + v);
    else multiply_add(even, tile[v], vectors + v);
  }
  return even + odd;
}

// sums[e] += the product of a tile with the source at offsets[e], summed over the pixels, for e in [entry, end).
template <int NV>
IN_PLACE void dot(const Vector (&tile)[NV], const int32_t* offsets, int32_t entry, int32_t end, const char* base,
                  float* sums) {
  for (; entry < end; entry += FOUR) {
    uint64_t near, far;
    std::memcpy(&near, offsets + entry, 8);
    std::memcpy(&far, offsets + entry + 2, 8);
    const Vector first = multiply_sum(tile, base + static_cast<uint32_t>(near));
    const Vector second = multiply_sum(tile, base + (near >> 32));
    const Vector low = add_neighbours(first, second);
    const Vector third = multiply_sum(tile, base + static_cast<uint32_t>(far));
    const Vector fourth = multiply_sum(tile, base + (far >> 32));
    const Vector high = add_neighbours(third, fourth);
    // neighbouring pairs are added: lanes 0-3 and 4-7 of `halves` each hold a half of the four sums
    const Vector swapped = __builtin_shufflevector(low, high, 8, 9, 2, 3, 12, 13, 6, 7);
    const Vector halves = __builtin_shufflevector(low, high, 0, 1, 10, 11, 4, 5, 14, 15) +
                          __builtin_shufflevector(swapped, swapped, 2, 3, 0, 1, 6, 7, 4, 5);
    Quarter sum;
    std::memcpy(&sum, sums + entry, sizeof sum);
    sum += __builtin_shufflevector(halves, halves, 0, 1, 2, 3) + __builtin_shufflevector(halves, halves, 4, 5, 6, 7);
    std::memcpy(sums + entry, &sum, sizeof sum);
  }
}
