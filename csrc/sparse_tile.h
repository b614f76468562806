// The inner loops: a tile is up to eight consecutive vectors of pixels of one output channel, held in registers while
// the nonzeros of its line go by, so that a nonzero costs one load and one multiply-add for each vector.
#pragma once
#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "sparse_blocks.h"

// Whether a vector is one register, with a fused multiply-add: then instructions are written out below.
#if defined(__FMA__) && CORE_LANES == 8
#define ONE_REGISTER 1
#define REPEAT_FOUR "vbroadcastf128 %1, %0"
#elif defined(__AVX512F__) && CORE_LANES == 16
#define ONE_REGISTER 1
#define REPEAT_FOUR "vbroadcastf32x4 %1, %0"
#else
#define ONE_REGISTER 0
#endif

typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4)));

// Four floats in every quarter of a vector.
template <int... I>
ALWAYS_INLINE Vector repeat(Quarter four, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(four, four, (I % 4)...);
}
ALWAYS_INLINE Vector load_repeated(const float* p) {
#if ONE_REGISTER
  Vector repeated;  // written out: from the intrinsic, too, compilers make a load for each of the four
  asm(REPEAT_FOUR : "=v"(repeated) : "m"(*reinterpret_cast<const Quarter*>(p)));
  return repeated;
#else
  Quarter four;
  std::memcpy(&four, p, sizeof four);
  return repeat(four, std::make_integer_sequence<int, LANES>{});
#endif
}

// Lane PLACE of each quarter in all four.
template <int PLACE>
ALWAYS_INLINE Vector spread_in_quarters(Vector v) {
  return shuffle(v, v, [](int i) { return i - i % 4 + PLACE; });
}

// sum += weight * source. Two loads in one cycle must not meet in the same half of their cache lines, so neighbours are
// loaded one after the other: compilers would change the order.
ALWAYS_INLINE void multiply_add(Vector& sum, Vector weight, const Unaligned* source) {
#if ONE_REGISTER
  asm volatile("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(weight), "m"(*source));
#else
  sum += weight * *source;
#endif
}

ALWAYS_INLINE Vector multiply(Vector weight, const Unaligned* source) {
#if ONE_REGISTER
  Vector product;
  asm volatile("vmulps %2, %1, %0" : "=v"(product) : "v"(weight), "m"(*source));
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
// in one, and four offsets, in units of STEP bytes, in two. A tile of few vectors has its sums in up to four sets: a multiply-add waits for the
// last one of its own sum, and eight sums are what keeps the machine busy.
template <int STEP = 1, int NV>
ALWAYS_INLINE void accumulate(Vector (&sum)[NV], const Blocks& blocks, int64_t& entry, int64_t end, const char* base) {
  constexpr int SETS = NV > 4 ? 1 : NV > 2 ? 2 : 4;
  const int32_t* offsets = blocks.offsets;
  const float* weights = blocks.weights;
  Vector more[SETS][NV] = {};  // but the first, which is `sum`
  for (; entry < end; entry += UNROLL) {
    uint64_t near, far;
    std::memcpy(&near, offsets + entry, 8);
    std::memcpy(&far, offsets + entry + 2, 8);
    const Vector four = load_repeated(weights + entry);
    add_scaled(sum, spread_in_quarters<0>(four), source_at(base, (near & UINT32_MAX) * STEP));
    add_scaled(SETS > 1 ? more[1 % SETS] : sum, spread_in_quarters<1>(four), source_at(base, (near >> 32) * STEP));
    add_scaled(SETS > 2 ? more[2 % SETS] : sum, spread_in_quarters<2>(four), source_at(base, (far & UINT32_MAX) * STEP));
    add_scaled(SETS > 1 ? more[3 % SETS] : sum, spread_in_quarters<3>(four), source_at(base, (far >> 32) * STEP));
  }
#pragma GCC unroll 4
  for (int set = 1; set < SETS; ++set) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) sum[v] += more[set][v];
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

// Every row of ROW pixels moved by one; a zero comes in at its edge.
template <int ROW, int NV>
ALWAYS_INLINE void move_right(Vector (&moved)[NV], const Vector (&tile)[NV]) {
#pragma GCC unroll 8
  for (int v = NV - 1; v >= 0; --v) {  // from the end: `moved` may be `tile`
    const Vector before = v * LANES % ROW ? tile[v - 1] : Vector{};
    moved[v] = shuffle(before, tile[v], [](int i) { return LANES - 1 + (i % ROW ? i : 0); });
  }
}
template <int ROW, int NV>
ALWAYS_INLINE void move_left(Vector (&moved)[NV], const Vector (&tile)[NV]) {
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) {
    const Vector after = (v + 1) * LANES % ROW ? tile[v + 1] : Vector{};
    moved[v] = shuffle(tile[v], after, [](int i) { return (i + 1) % ROW ? i + 1 : LANES; });
  }
}

ALWAYS_INLINE Quarter sum_quarters(Vector v) {
#if defined(__AVX512F__) && CORE_LANES == 16
  const __m256 half = _mm512_castps512_ps256(v) + _mm512_extractf32x8_ps(v, 1);
#elif defined(__AVX__) && CORE_LANES == 8
  const __m256 half = v;
#endif
#if ONE_REGISTER
  return _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);  // compilers would move both halves
#else
  Quarter quarters[QUARTERS];
  std::memcpy(quarters, &v, sizeof v);
  for (int i = 1; i < QUARTERS; ++i) quarters[0] += quarters[i];
  return quarters[0];
#endif
}

// (a, b) -> a0 + a2, b0 + b2, a1 + a3, b1 + b3, ...
ALWAYS_INLINE Vector add_apart(Vector a, Vector b) { return lower_turns(a, b) + upper_turns(a, b); }

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
template <int STEP = 1, int NV>
ALWAYS_INLINE void dot(const Vector (&tile)[NV], const int32_t* offsets, int64_t entry, int64_t end, const char* base,
                  float* sums) {
  for (; entry < end; entry += UNROLL) {
    uint64_t near, far;
    std::memcpy(&near, offsets + entry, 8);
    std::memcpy(&far, offsets + entry + 2, 8);
    const Vector first = multiply_sum(tile, source_at(base, (near & UINT32_MAX) * STEP));
    const Vector second = multiply_sum(tile, source_at(base, (near >> 32) * STEP));
    const Vector low = add_apart(first, second);
    const Vector third = multiply_sum(tile, source_at(base, (far & UINT32_MAX) * STEP));
    const Vector fourth = multiply_sum(tile, source_at(base, (far >> 32) * STEP));
    const Vector high = add_apart(third, fourth);
    const Vector each = lower_pairs(low, high) + upper_pairs(low, high);  // every quarter has a part of the four sums
    Quarter sum;
    std::memcpy(&sum, sums + entry, sizeof sum);
    sum += sum_quarters(each);
    std::memcpy(sums + entry, &sum, sizeof sum);
  }
}
