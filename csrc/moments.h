// How a block of a tensor is widened to FP32 and narrowed again: weights and gradients in 32 or 16 bits, moments in
// those, in FP16 with one scale a tensor, or in 8 bits with one scale a block.
//
// 8 bits hold the fourth root: value = scale * (q / 127)^4, with its sign, or scale * (q / 255)^4 where all values
// are positive; so the spacing is 3% (1.6%) of the largest value of a block and shrinks with the value. Rounding is
// to nearest, or, with `noise` (16 random bits an element), up or down by chance such that the mean is right.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "threefry.h"
#include "vector.h"

constexpr int64_t BLOCK = 256;
enum Storage { FP32 = 0, FP16 = 1, BF16 = 2, SIGNED = 3, UNSIGNED = 4 };  // the codes of kernels/update.py

struct Array {
  void* data;            // null: not there, reads as zeros and is not written
  int storage;
  float* scales;         // one a block for 8 bits; one in all, a power of two, for scaled FP16; else null
  float old_scale = 1, new_scale = 1;  // of scaled FP16

  bool one_scale() const { return data && scales && storage == FP16; }
};

struct Noise {
  Words key;
  uint32_t stream;

  // 16 bits for each element of a block: those of 64 counters, a quarter of the block from each half of a word.
  void fill(int64_t block, uint32_t* bits) const {
    constexpr int64_t QUARTER = BLOCK / 4;
    for (int64_t i = 0; i < QUARTER; ++i) {
      const Words words = threefry(key, {static_cast<uint32_t>(block * QUARTER + i), stream});
      bits[i] = words.first & 0xffff;
      bits[QUARTER + i] = words.first >> 16;
      bits[2 * QUARTER + i] = words.second & 0xffff;
      bits[3 * QUARTER + i] = words.second >> 16;
    }
  }
};

// The largest magnitude, NaN above all: magnitudes are ordered as their bits are.
inline float largest(const float* values) {
  IntVector top{};
  for (int64_t i = 0; i < BLOCK; i += LANES) {
    const IntVector bits = bits_of<IntVector>(load(values + i)) & 0x7fffffff;
    top = bits > top ? bits : top;
  }
  int32_t most = 0;
  for (int i = 0; i < LANES; ++i) most = top[i] > most ? top[i] : most;
  return bits_of<float>(most);
}

// -- reading ---------------------------------------------------------------------------------------------------------
template <class T>
inline void widen_block(const T* p, int64_t count, float scale, float* out) {
  for (int64_t i = 0; i < BLOCK; i += LANES) {
    const int64_t left = count - i;
    if (left >= LANES) store(out + i, load(p + i) * scale);
    else store(out + i, left > 0 ? load_part(p + i, static_cast<int>(left)) * scale : Vector{});
  }
}

template <class T>
inline void decode_block(const T* p, int64_t count, float scale, float* out) {
  constexpr float LEVELS = static_cast<T>(-1) < 0 ? 127 : 255;
  T codes[BLOCK] = {};
  std::memcpy(codes, p, count);
  for (int64_t i = 0; i < BLOCK; ++i) {
    const float root = static_cast<float>(codes[i]) * (1 / LEVELS), square = root * root;
    out[i] = scale * square * (root * std::fabs(root));
  }
}

inline void widen(const Array& array, int64_t block, int64_t count, float* out) {
  const int64_t begin = block * BLOCK;
  if (!array.data) return std::fill(out, out + BLOCK, 0.0f);
  switch (array.storage) {
    case FP32: return widen_block(static_cast<const float*>(array.data) + begin, count, 1, out);
    case FP16: return widen_block(static_cast<const Half*>(array.data) + begin, count, array.old_scale, out);
    case BF16: return widen_block(static_cast<const Bfloat*>(array.data) + begin, count, 1, out);
    case SIGNED: return decode_block(static_cast<const int8_t*>(array.data) + begin, count, array.scales[block], out);
    case UNSIGNED: return decode_block(static_cast<const uint8_t*>(array.data) + begin, count, array.scales[block], out);
  }
}

// -- writing ---------------------------------------------------------------------------------------------------------
// Random bits are added below the last bit that is kept, and what is below it is dropped. A NaN has no place for them.
template <int DROPPED>
inline void dither(float* values, const uint32_t* noise) {
  for (int64_t i = 0; i < BLOCK; ++i) {
    const uint32_t bits = bits_of<uint32_t>(values[i]), up = bits + (noise[i] >> (16 - DROPPED));
    const uint32_t kept = (bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : up;
    values[i] = bits_of<float>(kept & ~((1u << DROPPED) - 1));
  }
}

template <class T>
inline void narrow_block(T* p, int64_t count, const float* in) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(p + i, load(in + i));
  if (i < count) store_part(p + i, load(in + i), static_cast<int>(count - i));
}

template <class T>
inline void encode_block(T* p, int64_t count, float* scale, const float* in, const uint32_t* noise) {
  constexpr float LEVELS = static_cast<T>(-1) < 0 ? 127 : 255;
  const float top = largest(in), inverse = top < FLT_MIN ? 0 : 1 / top;
  T codes[BLOCK];
  for (int64_t i = 0; i < BLOCK; ++i) {
    const float ratio = std::fabs(in[i]) * inverse, level = LEVELS * std::sqrt(std::sqrt(ratio > 0 ? ratio : 0));
    const float shift = noise ? static_cast<float>(noise[i]) * 0x1p-16f : 0.5f;
    // What is not zero does not become zero where there is no sign: a second moment of zero would divide by nothing.
    const float least = LEVELS == 255 && ratio > 0 ? 1 : 0, code = level + shift;
    const int32_t whole = static_cast<int32_t>(code < least ? least : code > LEVELS ? LEVELS : code);
    codes[i] = static_cast<T>(in[i] < 0 ? -whole : whole);
  }
  std::memcpy(p, codes, count);
  *scale = top < FLT_MIN ? 0 : top;
}

inline void narrow(const Array& array, int64_t block, int64_t count, float* values, const uint32_t* noise) {
  const int64_t begin = block * BLOCK;
  if (!array.data) return;
  if (array.one_scale())
    for (int64_t i = 0; i < BLOCK; ++i) values[i] /= array.new_scale;
  if (noise && array.storage == FP16) dither<13>(values, noise);
  if (noise && array.storage == BF16) dither<16>(values, noise);
  switch (array.storage) {
    case FP32: return narrow_block(static_cast<float*>(array.data) + begin, count, values);
    case FP16: return narrow_block(static_cast<Half*>(array.data) + begin, count, values);
    case BF16: return narrow_block(static_cast<Bfloat*>(array.data) + begin, count, values);
    case SIGNED:
      return encode_block(static_cast<int8_t*>(array.data) + begin, count, array.scales + block, values, noise);
    case UNSIGNED:
      return encode_block(static_cast<uint8_t*>(array.data) + begin, count, array.scales + block, values, noise);
  }
}
