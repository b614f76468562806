// How a block of a tensor is widened to FP32 and narrowed again: weights and gradients in 32 or 16 bits, moments in
// those, or in FP16 or 8 bits with one scale a block. That of FP16 is a power of two, so that it rounds nothing.
//
// 8 bits hold the fourth root: value = scale * (q / 127)^4, with its sign, or scale * (q / 255)^4 where all values
// are positive; so the spacing is 3% (1.6%) of the largest value of a block and shrinks with the value. Rounding is
// to nearest, or, with 16 random bits an element, up or down by chance such that the mean is right.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <type_traits>

#include "threefry.h"
#include "vector.h"

constexpr int64_t BLOCK = 256, PARTS = 8, PART = BLOCK / PARTS;
enum Storage { FP32 = 0, FP16 = 1, BF16 = 2, SIGNED = 3, UNSIGNED = 4 };  // the codes of kernels/update.py

struct Signed { int8_t code; };
struct Unsigned { uint8_t code; };

struct Array {
  void* data;            // null: not there, reads as zeros and is not written
  int storage;
  float* scales;         // one a block of moments in FP16 or 8 bits; else null

  int64_t bytes(int64_t count) const { return count * (storage == FP32 ? 4 : storage <= BF16 ? 2 : 1); }

  // That block alone.
  Array block(int64_t number) const {
    Array one = *this;
    if (data) one.data = static_cast<uint8_t*>(data) + bytes(number * BLOCK);
    if (scales) one.scales += number;
    return one;
  }
};

// -- random bits -----------------------------------------------------------------------------------------------------
// Those of one block: 32 counters, of which each gives 16 bits to one element of each quarter of the first half, and
// their complement to one of the second: as random for each, and what rounds the one up rather rounds the other down.
struct Noise {
  Words key;
  uint32_t stream;
  int64_t block;

  void draw(int64_t i, BitVector (&bits)[PARTS]) const {
    BitVector first[1], second[1] = {BitVector{} + stream};
    for (int lane = 0; lane < LANES; ++lane) first[0][lane] = lane;
    first[0] += static_cast<uint32_t>(block * PART + i);
    threefry(key, first, second);
    bits[0] = first[0] & 0xffffu, bits[1] = first[0] >> 16, bits[2] = second[0] & 0xffffu, bits[3] = second[0] >> 16;
    for (int part = 0; part < PARTS / 2; ++part) bits[PARTS / 2 + part] = bits[part] ^ 0xffffu;
  }
};

// body(i, bits) for every LANES elements of a block, from i on; bits are zero unless BY_CHANCE.
template <bool BY_CHANCE, class Body>
ALWAYS_INLINE void each_vector(const Noise& noise, Body body) {
  if constexpr (!BY_CHANCE) {
    for (int64_t i = 0; i < BLOCK; i += LANES) body(i, BitVector{});
  } else {
    for (int64_t i = 0; i < PART; i += LANES) {
      BitVector bits[PARTS];
      noise.draw(i, bits);
#pragma GCC unroll 8
      for (int part = 0; part < PARTS; ++part) body(i + part * PART, bits[part]);
    }
  }
}

// -- reading ---------------------------------------------------------------------------------------------------------
inline Vector magnitude(Vector v) { return bits_of<Vector>(bits_of<BitVector>(v) & 0x7fffffffu); }

inline Vector load(const Signed* p) {
  const Vector root = __builtin_convertvector(widened(&p->code), Vector) * (1 / 127.0f);
  return root * root * (root * magnitude(root));
}
inline Vector load(const Unsigned* p) {
  const Vector root = __builtin_convertvector(widened(&p->code), Vector) * (1 / 255.0f), square = root * root;
  return square * square;
}

template <class T>
inline const float* widen_block(const void* data, float scale, float* out) {
  for (int64_t i = 0; i < BLOCK; i += LANES) store(out + i, load(static_cast<const T*>(data) + i) * scale);
  return out;
}

// A block's values: where they are if that is FP32, else in `room`.
inline const float* widen(const Array& block, float* room) {
  alignas(64) static const float ZEROS[BLOCK] = {};
  if (!block.data) return ZEROS;
  const float scale = block.scales ? *block.scales : 1;
  switch (block.storage) {
    case FP16: return widen_block<Half>(block.data, scale, room);
    case BF16: return widen_block<Bfloat>(block.data, scale, room);
    case SIGNED: return widen_block<Signed>(block.data, scale, room);
    case UNSIGNED: return widen_block<Unsigned>(block.data, scale, room);
    default: return static_cast<const float*>(block.data);
  }
}

// -- writing ---------------------------------------------------------------------------------------------------------
// Random bits are added below the last bit that is kept, and what is below it is dropped. A NaN has no place for them.
template <int DROPPED>
inline BitVector dither(Vector v, BitVector random) {
  const BitVector bits = bits_of<BitVector>(v), up = bits + (random >> (16 - DROPPED));
  return (is_nan(v) ? bits | 0x400000u : up) & ~((1u << DROPPED) - 1);
}
inline void store(float* p, Vector v, BitVector) { store(p, v); }
inline void store(Half* p, Vector v, BitVector random) { store(p, bits_of<Vector>(dither<13>(v, random))); }
inline void store(Bfloat* p, Vector v, BitVector random) { store_lower(p, dither<16>(v, random) >> 16); }

// The largest so far of each lane, of numbers without sign, as bits: they are ordered as numbers are, NaN above all.
struct Peak {
  BitVector top{};

  void see(Vector v) {
    const BitVector bits = bits_of<BitVector>(v);
    top = bits > top ? bits : top;
  }
  uint32_t bits() const {
    uint32_t most = 0;
    for (int i = 0; i < LANES; ++i) most = std::max(most, top[i]);
    return most;
  }
};

// x^(1/4), to 1e-7, of what is not negative. q is x^(-1/4) to 3%, by its bits, and the root is x q^3 (x q^4)^(-3/4), whose
// last factor is 1 + off slope.
inline Vector fourth_root(Vector x) {
  const Vector q = bits_of<Vector>(0x4f584000 - (bits_of<IntVector>(x) >> 2)), square = q * q, part = x * square;
  const Vector off = part * square - 1, off2 = off * off, root = part * q;
  const Vector high = (off * 0.57505929f - 0.60163671f) - off2 * 0.53746229f;
  const Vector slope = (off * 0.65619719f - 0.7499997f) + off2 * high;
  return root * off * slope + root;
}

// Numbers between -1 and 1 -> their codes. Two square roots take longer than the multiplications of fourth_root, but go
// on beside them: Adam's two moments are encoded in one loop, each in one of the two ways.
inline IntVector encode(Signed, Vector ratio, Vector chance) {
  const BitVector sign = bits_of<BitVector>(ratio) & 0x80000000u;
  const Vector code = fourth_root(magnitude(ratio)) * 127 + chance;
  return __builtin_convertvector(bits_of<Vector>(bits_of<BitVector>(code) | sign), IntVector);
}
inline IntVector encode(Unsigned, Vector ratio, Vector chance) {
  constexpr float MOST = 255 * (1 - 0x1p-22f);  // with the chance it does not reach 256
  const IntVector code = __builtin_convertvector(square_root(square_root(ratio)) * MOST + chance, IntVector);
  // What is not zero does not become zero: a second moment of zero would divide by nothing.
  const IntVector bits = bits_of<IntVector>(ratio), least = bits < 1 ? bits : IntVector{} + 1;
  return code > least ? code : least;
}

// Writes a weight's values, if they are not in their place already.
inline void narrow(const Array& block, const float* values, const Noise& noise) {
  if (block.storage == FP16)
    for (int64_t i = 0; i < BLOCK; i += LANES) store(static_cast<Half*>(block.data) + i, load(values + i));
  if (block.storage == BF16)
    each_vector<true>(noise, [&](int64_t i, BitVector random) {
      store(static_cast<Bfloat*>(block.data) + i, load(values + i), random);
    });
}

// -- scales ----------------------------------------------------------------------------------------------------------
// The scale of a block by the bits of its largest magnitude. In FP16 the power of two that brings it just under 2^15, half
// of the range; in 8 bits the largest itself.
inline float scale_for(Half, uint32_t top) {
  return top == 0 ? 1 : bits_of<float>((std::max(top >> 23, 15u) - 14) << 23);
}
template <class Code>
inline float scale_for(Code, uint32_t top) {
  const float most = bits_of<float>(top);
  return most < FLT_MIN ? 0 : most;
}

// A value over its block's scale -> where it is stored.
template <class Code, bool BY_CHANCE>
inline void put(Code* to, Vector ratio, BitVector random) {
  if constexpr (!std::is_same_v<Code, Half>) {
    const Vector chance = __builtin_convertvector(bits_of<IntVector>(random), Vector) * 0x1p-16f;
    store_narrow(&to->code, encode(Code{}, ratio, BY_CHANCE ? chance : broadcast(0.5f)));
  } else if constexpr (BY_CHANCE) {
    store(to, ratio, random);
  } else {
    store(to, ratio);
  }
}

// -- a block of a moment, stored as T --------------------------------------------------------------------------------
// Without a scale: values are written as soon as they are new; into `room` if they are not kept.
template <class T, bool BY_CHANCE>
struct PlainMoment {
  static constexpr bool WAITS = false;
  const T* from;
  T* to;

  PlainMoment(const Array& block, float* room, bool kept)
      : from(static_cast<const T*>(block.data)), to(kept ? static_cast<T*>(block.data) : reinterpret_cast<T*>(room)) {}

  Vector read(int64_t i) const { return load(from + i); }
  void write(int64_t i, Vector v, BitVector random) const { BY_CHANCE ? store(to + i, v, random) : store(to + i, v); }
};

// With one: new values wait in `room` until the largest is known.
template <class T, bool BY_CHANCE>
struct ScaledMoment {
  static constexpr bool WAITS = true;
  T* values;
  float *scales, *room, scale, inverse;
  Peak peak;

  ScaledMoment(const Array& block, float* room, bool)
      : values(static_cast<T*>(block.data)), scales(block.scales), room(room), scale(*scales) {}

  Vector read(int64_t i) const { return load(values + i) * scale; }
  void write(int64_t i, Vector v, BitVector) {
    store(room + i, v);
    peak.see(std::is_same_v<T, Unsigned> ? v : magnitude(v));
  }

  void choose_scale() {
    const uint32_t top = peak.bits();
    const bool finite = std::isfinite(bits_of<float>(top));
    *scales = finite ? scale_for(T{}, top) : bits_of<float>(top);
    inverse = finite && *scales ? 1 / *scales : 0;
    if (!finite) std::fill(room, room + BLOCK, 0.0f);  // the scale says enough
  }
  void put(int64_t i, BitVector random) const { ::put<T, BY_CHANCE>(values + i, load(room + i) * inverse, random); }
};

// One that is not there reads as zeros.
struct None {};
struct NoMoment {
  static constexpr bool WAITS = false;
  NoMoment(const Array&, float*, bool) {}
  Vector read(int64_t) const { return Vector{}; }
  void write(int64_t, Vector, BitVector) const {}
  void choose_scale() const {}
  void put(int64_t, BitVector) const {}
};

template <class T>
constexpr bool IS_PLAIN = std::is_same_v<T, float> || std::is_same_v<T, Bfloat>;
template <class T, bool BY_CHANCE>
using Moment =
    std::conditional_t<std::is_same_v<T, None>, NoMoment,
                       std::conditional_t<IS_PLAIN<T>, PlainMoment<T, BY_CHANCE>, ScaledMoment<T, BY_CHANCE>>>;
