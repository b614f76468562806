// Eight FP32 lanes, and the storage types that are widened to FP32 when loaded and rounded when stored.
// Vectors are the compiler's own, so the same code runs on any machine; only the 16-bit conversions differ.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int LANES = 8;
typedef float Vector __attribute__((vector_size(32)));
typedef int32_t IntVector __attribute__((vector_size(32)));
typedef uint32_t BitVector __attribute__((vector_size(32)));
typedef uint16_t HalfVector __attribute__((vector_size(16)));

struct Half { uint16_t bits; };
struct Bfloat { uint16_t bits; };

inline Vector broadcast(float value) { return Vector{} + value; }

template <class To, class From>
inline To bits_of(const From& value) {
  static_assert(sizeof(To) == sizeof(From), "only the type changes, not the bytes");
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

// Rounds to nearest even; a NaN keeps its upper bits and is made quiet.
inline BitVector bfloat_bits(BitVector x) {
  const BitVector rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
  const BitVector quiet = (x >> 16) | 0x40u;
  return (x & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
}

inline Vector load(const float* p) { Vector v; std::memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, Vector v) { std::memcpy(p, &v, sizeof v); }

inline Vector load(const Bfloat* p) {
  HalfVector h;
  std::memcpy(&h, p, sizeof h);
  return bits_of<Vector>(__builtin_convertvector(h, BitVector) << 16);
}
inline void store(Bfloat* p, Vector v) {
  const BitVector b = bfloat_bits(bits_of<BitVector>(v));
#if defined(__AVX2__)  // one instruction where the general form takes six
  const __m256i wide = bits_of<__m256i>(b);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
#else
  const HalfVector h = __builtin_convertvector(b, HalfVector);
  std::memcpy(p, &h, sizeof h);
#endif
}

#if defined(__F16C__)
inline Vector load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void store(Half* p, Vector v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
#else
inline Vector load(const Half* p) {
  Vector v;
  for (int i = 0; i < LANES; ++i) v[i] = static_cast<float>(bits_of<_Float16>(p[i]));
  return v;
}
inline void store(Half* p, Vector v) {
  for (int i = 0; i < LANES; ++i) p[i] = bits_of<Half>(static_cast<_Float16>(v[i]));
}
#endif

inline float widen(float x) { return x; }
inline float widen(Bfloat x) { return bits_of<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(Half x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  return static_cast<float>(bits_of<_Float16>(x));
#endif
}

// The first `lanes` of a vector; what is not there reads as `fill` and is not written.
template <class T>
inline Vector load_part(const T* p, int lanes, float fill = 0) {
  if (lanes == LANES) return load(p);
  T few[LANES] = {};
  std::memcpy(few, p, lanes * sizeof(T));
  Vector v = load(few);
  for (int i = lanes; i < LANES; ++i) v[i] = fill;
  return v;
}
template <class T>
inline void store_part(T* p, Vector v, int lanes) {
  if (lanes == LANES) return store(p, v);
  T few[LANES];
  store(few, v);
  std::memcpy(p, few, lanes * sizeof(T));
}

// The storage codes of kernels/storage.py.
template <class F>
inline void with_storage(int code, F body) {
  if (code == 0) body(float{});
  if (code == 1) body(Half{});
  if (code == 2) body(Bfloat{});
}
