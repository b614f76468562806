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

typedef Vector Square[LANES];

// Eight vectors of eight: rows become columns.
inline void transpose(Square& v) {
  Square a;
  for (int i = 0; i < 8; i += 2) {
    a[i] = __builtin_shufflevector(v[i], v[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    a[i + 1] = __builtin_shufflevector(v[i], v[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  Square b;
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = __builtin_shufflevector(a[i + j], a[i + 2 + j], 0, 1, 8, 9, 4, 5, 12, 13);
      b[i + 2 * j + 1] = __builtin_shufflevector(a[i + j], a[i + 2 + j], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; ++i) {
    v[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    v[i + 4] = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// to[column * to_stride + row] = from[row * from_stride + column] for up to eight rows and columns.
template <class From, class To>
inline void transpose_square(const From* from, int64_t from_stride, int rows, int columns, To* to, int64_t to_stride) {
  Square square;
  for (int i = 0; i < LANES; ++i) square[i] = i < rows ? load_part(from + i * from_stride, columns) : Vector{};
  transpose(square);
  for (int i = 0; i < columns; ++i) store_part(to + i * to_stride, square[i], rows);
}

// The same for any number.
template <class From, class To>
void transpose(const From* from, int64_t from_stride, int64_t rows, int64_t columns, To* to, int64_t to_stride) {
  for (int64_t r = 0; r < rows; r += LANES) {
    for (int64_t c = 0; c < columns; c += LANES) {
      const From* square = from + r * from_stride + c;
      To* out = to + c * to_stride + r;
      if (rows - r >= LANES && columns - c >= LANES) {  // numbers that the compiler knows
        transpose_square(square, from_stride, LANES, LANES, out, to_stride);
      } else {
        const int high = static_cast<int>(rows - r < LANES ? rows - r : LANES);
        const int wide = static_cast<int>(columns - c < LANES ? columns - c : LANES);
        transpose_square(square, from_stride, high, wide, out, to_stride);
      }
    }
  }
}

// The storage codes of kernels/storage.py.
template <class F>
inline void with_storage(int code, F body) {
  if (code == 0) body(float{});
  if (code == 1) body(Half{});
  if (code == 2) body(Bfloat{});
}
