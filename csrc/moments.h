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
  int64_t bytes(int64_t count) const { return count * (storage == FP32 ? 4 : storage <= BF16 ? 2 : 1); }

  // That block alone.
  Array block(int64_t number) const {
    Array one = *this;
    if (data) one.data = static_cast<uint8_t*>(data) + bytes(number * BLOCK);
    if (scales && storage >= SIGNED) one.scales += number;
    return one;
  }
};

struct Noise {
  Words key;
  uint32_t stream;

  // 16 bits for each element of a block: those of 64 counters, a quarter of the block from each half of a word.
  void fill(int64_t block, uint32_t* bits) const {
    constexpr int64_t QUARTER = BLOCK / 4;
    constexpr int SIDES = 4;
    static_assert(QUARTER % (SIDES * LANES) == 0, "whole vectors");
    BitVector lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    for (int64_t i = 0; i < QUARTER; i += SIDES * LANES) {
      BitVector first[SIDES], second[SIDES];
      for (int side = 0; side < SIDES; ++side) {
        first[side] = lane + static_cast<uint32_t>(block * QUARTER + i + side * LANES);
        second[side] = BitVector{} + stream;
      }
      threefry(key, first, second);
      for (int side = 0; side < SIDES; ++side) {
        const BitVector a = first[side], b = second[side], halves[4] = {a & 0xffffu, a >> 16, b & 0xffffu, b >> 16};
        uint32_t* to = bits + i + side * LANES;
        for (int part = 0; part < 4; ++part) std::memcpy(to + part * QUARTER, &halves[part], sizeof a);
      }
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
inline const float* widen_block(const T* p, float scale, float* out) {
  for (int64_t i = 0; i < BLOCK; i += LANES) store(out + i, load(p + i) * scale);
  return out;
}

template <class T>
inline const float* decode_block(const T* p, float scale, float* out) {
  constexpr float LEVELS = static_cast<T>(-1) < 0 ? 127 : 255;
  for (int64_t i = 0; i < BLOCK; ++i) {
    const float root = static_cast<float>(p[i]) * (1 / LEVELS), square = root * root;
    out[i] = scale * square * (root * std::fabs(root));
  }
  return out;
}

// A block's values: where they are if that is FP32, else in `room`.
inline const float* widen(const Array& block, float* room) {
  const void* data = block.data;
  if (!data) return std::fill(room, room + BLOCK, 0.0f), room;
  switch (block.storage) {
    case FP16: return widen_block(static_cast<const Half*>(data), block.old_scale, room);
    case BF16: return widen_block(static_cast<const Bfloat*>(data), 1, room);
    case SIGNED: return decode_block(static_cast<const int8_t*>(data), *block.scales, room);
    case UNSIGNED: return decode_block(static_cast<const uint8_t*>(data), *block.scales, room);
    default: return static_cast<const float*>(data);
  }
}

// -- writing ---------------------------------------------------------------------------------------------------------
// Random bits are added below the last bit that is kept, and what is below it is dropped. A NaN has no place for them.
template <int DROPPED>
inline BitVector dither(const float* values, const uint32_t* noise) {
  BitVector bits, random;
  std::memcpy(&bits, values, sizeof bits);
  std::memcpy(&random, noise, sizeof random);
  const BitVector up = bits + (random >> (16 - DROPPED));
  return ((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : up) & ~((1u << DROPPED) - 1);
}
inline void dither_block(Half* p, const float* in, const uint32_t* noise) {
  for (int64_t i = 0; i < BLOCK; i += LANES) store(p + i, bits_of<Vector>(dither<13>(in + i, noise + i)));
}
inline void dither_block(Bfloat* p, const float* in, const uint32_t* noise) {
  for (int64_t i = 0; i < BLOCK; i += LANES) store_lower(p + i, dither<16>(in + i, noise + i) >> 16);
}

template <class T>
inline void narrow_block(T* p, const float* in, const uint32_t* noise) {
  if constexpr (sizeof(T) == 2) {
    if (noise) return dither_block(p, in, noise);
  }
  for (int64_t i = 0; i < BLOCK; i += LANES) store(p + i, load(in + i));
}

// x^(1/4), to 1e-7, of what is not negative. q is x^(-1/4) to 3%, by its bits, and the root is x q^3 (x q^4)^(-3/4), whose
// last factor is 1 + off slope. Two square roots would take longer.
inline Vector fourth_root(Vector x) {
  const Vector q = bits_of<Vector>(0x4f584000 - (bits_of<IntVector>(x) >> 2)), square = q * q, part = x * square;
  const Vector off = part * square - 1, off2 = off * off, root = part * q;
  const Vector high = (off * 0.57505929f - 0.60163671f) - off2 * 0.53746229f;
  const Vector slope = (off * 0.65619719f - 0.7499997f) + off2 * high;
  return root * off * slope + root;
}

template <class T>
inline void encode_block(T* p, float* scale, const float* in, const uint32_t* noise) {
  constexpr bool SIGN = static_cast<T>(-1) < 0;
  constexpr float LEVELS = SIGN ? 127 : 255 * (1 - 0x1p-22f);  // with the noise it does not reach 256
  const float top = largest(in), inverse = 1 / top;
  *scale = top < FLT_MIN ? 0 : top;
  if (top < FLT_MIN || !std::isfinite(top)) return std::fill(p, p + BLOCK, T{});
  alignas(64) int32_t codes[BLOCK];
  for (int64_t i = 0; i < BLOCK; i += LANES) {
    const IntVector bits = bits_of<IntVector>(load(in + i)), sign = SIGN ? bits & INT32_MIN : IntVector{};
    const Vector ratio = bits_of<Vector>(bits ^ sign) * inverse;
    IntVector random = IntVector{} + (1 << 15);
    if (noise) std::memcpy(&random, noise + i, sizeof random);
    const Vector code = fourth_root(ratio) * LEVELS + __builtin_convertvector(random, Vector) * 0x1p-16f;
    IntVector whole = __builtin_convertvector(bits_of<Vector>(bits_of<IntVector>(code) | sign), IntVector);
    // What is not zero does not become zero where there is no sign: a second moment of zero would divide by nothing.
    if (!SIGN) whole = whole > -(ratio > 0.0f) ? whole : -(ratio > 0.0f);
    std::memcpy(codes + i, &whole, sizeof whole);
  }
  for (int64_t i = 0; i < BLOCK; ++i) p[i] = static_cast<T>(codes[i]);
}

// Writes a block's values, which change on their way; FP32 ones may be in their place already.
inline void narrow(const Array& block, float* values, const uint32_t* noise) {
  void* data = block.data;
  if (!data || data == values) return;
  if (block.one_scale()) {
    const float inverse = 1 / block.new_scale;  // exactly: a power of two
    for (int64_t i = 0; i < BLOCK; i += LANES) store(values + i, load(values + i) * inverse);
  }
  switch (block.storage) {
    case FP32: return narrow_block(static_cast<float*>(data), values, nullptr);
    case FP16: return narrow_block(static_cast<Half*>(data), values, noise);
    case BF16: return narrow_block(static_cast<Bfloat*>(data), values, noise);
    case SIGNED: return encode_block(static_cast<int8_t*>(data), block.scales, values, noise);
    case UNSIGNED: return encode_block(static_cast<uint8_t*>(data), block.scales, values, noise);
  }
}
