// The inner loops: a tile is up to eight consecutive vectors (64 pixels) of one output channel, held in registers while
// the nonzeros of its line go by, so that a nonzero costs one load and one multiply-add for each vector.
#pragma once
#include "sparse_blocks.h"

typedef float Unaligned __attribute__((vector_size(32), aligned(4)));

template <int NV>
inline void accumulate(Vector (&sum)[NV], const Weighted* entry, const Weighted* end, const char* base) {
  for (; entry != end; ++entry) {
    const Vector weight = broadcast(entry->weight);
    const Unaligned* source = reinterpret_cast<const Unaligned*>(base + entry->offset);
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) sum[v] += weight * source[v];
  }
}

// Moves every row of V vectors by one pixel; a zero comes in at its edge.
template <int V, int NV>
inline void move_right(Vector (&tile)[NV]) {
#pragma GCC unroll 8
  for (int v = NV - 1; v >= 0; --v) {
    const Vector before = v % V ? tile[v - 1] : Vector{};
    tile[v] = __builtin_shufflevector(before, tile[v], 7, 8, 9, 10, 11, 12, 13, 14);
  }
}
template <int V, int NV>
inline void move_left(Vector (&tile)[NV]) {
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) {
    const Vector after = (v + 1) % V ? tile[v + 1] : Vector{};
    tile[v] = __builtin_shufflevector(tile[v], after, 1, 2, 3, 4, 5, 6, 7, 8);
  }
}

// The products of a tile with four places of the source, each summed over the pixels, are added to sums[0..4).
template <int NV>
inline void dot_four(const Vector (&tile)[NV], const Ranked* entry, const char* base, float* sums) {
  Vector part[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Unaligned* source = reinterpret_cast<const Unaligned*>(base + entry[i].offset);
    part[i] = tile[0] * source[0];
#pragma GCC unroll 8
    for (int v = 1; v < NV; ++v) part[i] += tile[v] * source[v];
  }
  // lanes 0-3 and 4-7 of `quads` each hold a half of the four sums
  const Vector low = __builtin_shufflevector(part[0], part[1], 0, 8, 1, 9, 4, 12, 5, 13) +
                     __builtin_shufflevector(part[0], part[1], 2, 10, 3, 11, 6, 14, 7, 15);
  const Vector high = __builtin_shufflevector(part[2], part[3], 0, 8, 1, 9, 4, 12, 5, 13) +
                      __builtin_shufflevector(part[2], part[3], 2, 10, 3, 11, 6, 14, 7, 15);
  const Vector quads = __builtin_shufflevector(low, high, 0, 1, 8, 9, 4, 5, 12, 13) +
                       __builtin_shufflevector(low, high, 2, 3, 10, 11, 6, 7, 14, 15);
  for (int i = 0; i < 4; ++i) sums[i] += quads[i] + quads[i + 4];
}
