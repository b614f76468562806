// Vectors of LANES FP32 numbers, and the storage types that are widened to FP32 when loaded and rounded when stored.
// Vectors are the compiler's own, so the same code runs on any machine with any number of lanes: what the machine has
// not, the compiler makes of what it has. Only the 16-bit conversions differ. No number of lanes shows in what is
// stored, so that every core reads what another has written.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int LANES = CORE_LANES;  // CMakeLists.txt
static_assert(LANES == 4 || LANES == 8 || LANES == 16, "what the transposes are written for");
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVector __attribute__((vector_size(4 * LANES)));
typedef uint32_t BitVector __attribute__((vector_size(4 * LANES)));
typedef uint16_t HalfVector __attribute__((vector_size(2 * LANES)));
typedef float Quarter __attribute__((vector_size(16)));  // the four lanes that all machines have
constexpr int QUARTERS = LANES / 4;

// For what takes arrays that must stay in registers, and for shuffles, whose lanes the compiler must know.
#define ALWAYS_INLINE inline __attribute__((always_inline))

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

inline IntVector is_nan(Vector v) { return v != v; }

// Rounds to nearest even; a NaN keeps its upper bits and is made quiet.
inline BitVector bfloat_bits(BitVector x) {
  const BitVector rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
  const BitVector quiet = (x >> 16) | 0x40u;
  return is_nan(bits_of<Vector>(x)) ? quiet : rounded;
}

// FP16 by its bits, for machines that do not convert it, or whose compilers do so one by one. A NaN is made quiet.
inline BitVector half_to_float(BitVector h) {
  const BitVector sign = (h & 0x8000u) << 16, magnitude = (h & 0x7fffu) << 13;
  const Vector small = __builtin_convertvector(bits_of<IntVector>(h & 0x3ffu), Vector) * 0x1p-24f;
  const BitVector special = (magnitude + 0x70000000u) | ((h & 0x3ffu) != 0u ? BitVector{} + 0x400000u : BitVector{});
  const BitVector usual = magnitude >= 0x0f800000u ? special : magnitude + 0x38000000u;
  return sign | (magnitude < 0x00800000u ? bits_of<BitVector>(small) : usual);
}
// Rounds to nearest even. What FP16 has fewer digits for is added to a number whose last digit is FP16's last.
inline BitVector float_to_half(BitVector x) {
  const BitVector sign = (x & 0x80000000u) >> 16, magnitude = x & 0x7fffffffu;
  const BitVector small = bits_of<BitVector>(bits_of<Vector>(magnitude) + 0.5f) - 0x3f000000u;
  const BitVector usual = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const BitVector finite = magnitude < 0x38800000u ? small : usual;
  const BitVector large = magnitude > 0x7f800000u ? ((magnitude >> 13) & 0x3ffu) | 0x7e00u : BitVector{} + 0x7c00u;
  return sign | (magnitude < 0x477ff000u ? finite : large);
}

inline Vector square_root(Vector v) {
  for (int i = 0; i < LANES; ++i) v[i] = std::sqrt(v[i]);
  return v;
}

// Integers of 8 and 16 bits: widened, and narrowed, which they must fit. One to four instructions, where the compiler
// makes six to thirty of the general form.
#if defined(__AVX512F__) && CORE_LANES == 16
inline BitVector widened(const uint16_t* p) {
  return bits_of<BitVector>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
inline IntVector widened(const int8_t* p) {
  return bits_of<IntVector>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline IntVector widened(const uint8_t* p) {
  return bits_of<IntVector>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
#elif defined(__AVX2__) && CORE_LANES == 8
inline BitVector widened(const uint16_t* p) {
  return bits_of<BitVector>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline IntVector widened(const int8_t* p) {
  return bits_of<IntVector>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline IntVector widened(const uint8_t* p) {
  return bits_of<IntVector>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
#else
inline BitVector widened(const uint16_t* p) {
  HalfVector h;
  std::memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, BitVector);
}
template <class Byte>
inline IntVector widened(const Byte* p) {
  IntVector v;
  for (int i = 0; i < LANES; ++i) v[i] = p[i];
  return v;
}
#endif
#if defined(__AVX2__) && CORE_LANES == 8
inline __m128i lower_half(IntVector v) { return _mm256_castsi256_si128(bits_of<__m256i>(v)); }
inline __m128i upper_half(IntVector v) { return _mm256_extracti128_si256(bits_of<__m256i>(v), 1); }
inline void store_narrow(uint16_t* p, IntVector v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi32(lower_half(v), upper_half(v)));
}
inline void store_narrow(int8_t* p, IntVector v) {
  const __m128i words = _mm_packs_epi32(lower_half(v), upper_half(v));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
inline void store_narrow(uint8_t* p, IntVector v) {
  const __m128i words = _mm_packs_epi32(lower_half(v), upper_half(v));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
#else
template <class Narrow>
inline void store_narrow(Narrow* p, IntVector v) {
  typedef Narrow Few __attribute__((vector_size(sizeof(Narrow) * LANES)));
  const Few few = __builtin_convertvector(v, Few);
  std::memcpy(p, &few, sizeof few);
}
#endif

inline Vector load(const float* p) { Vector v; std::memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, Vector v) { std::memcpy(p, &v, sizeof v); }

inline Vector load(const Bfloat* p) { return bits_of<Vector>(widened(&p->bits) << 16); }
inline void store_lower(Bfloat* p, BitVector b) { store_narrow(&p->bits, bits_of<IntVector>(b)); }  // the lower halves
inline void store(Bfloat* p, Vector v) { store_lower(p, bfloat_bits(bits_of<BitVector>(v))); }

#if defined(__AVX512F__) && CORE_LANES == 16
inline Vector load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void store(Half* p, Vector v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__) && CORE_LANES == 8
inline Vector load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void store(Half* p, Vector v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
#else
inline Vector load(const Half* p) { return bits_of<Vector>(half_to_float(widened(&p->bits))); }
inline void store(Half* p, Vector v) {
  store_narrow(&p->bits, bits_of<IntVector>(float_to_half(bits_of<BitVector>(v))));
}
#endif

inline float widen(float x) { return x; }
inline float widen(Bfloat x) { return bits_of<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(Half x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  return bits_of<float>(half_to_float(BitVector{} + x.bits)[0]);
#endif
}

// The first `lanes` of a vector; what is not there reads as `fill` and is not written.
#if defined(__AVX512F__) && CORE_LANES == 16
// By masks, which the compiler's own vectors do not have: through memory a part costs ten times a whole vector.
inline __mmask16 first_lanes(int lanes) { return static_cast<__mmask16>((1u << lanes) - 1); }
inline Vector load_part(const float* p, int lanes, float fill = 0) {
  return _mm512_mask_loadu_ps(broadcast(fill), first_lanes(lanes), p);
}
inline Vector load_part(const Half* p, int lanes, float fill = 0) {
  const __mmask16 mask = first_lanes(lanes);
  return _mm512_mask_cvtph_ps(broadcast(fill), mask, _mm256_maskz_loadu_epi16(mask, p));
}
inline Vector load_part(const Bfloat* p, int lanes, float fill = 0) {
  const __mmask16 mask = first_lanes(lanes);
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p));
  return _mm512_mask_blend_ps(mask, broadcast(fill), _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
}
inline void store_part(float* p, Vector v, int lanes) { _mm512_mask_storeu_ps(p, first_lanes(lanes), v); }
template <class T>
inline void store_part(T* p, Vector v, int lanes) {
  T all[LANES];
  store(all, v);
  _mm256_mask_storeu_epi16(p, first_lanes(lanes), bits_of<__m256i>(all));
}
#else
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
#endif

// A vector whose lane i is lane place(i) of a, or of b from LANES on.
template <class Place, int... I>
ALWAYS_INLINE Vector shuffle(Vector a, Vector b, Place place, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, place(I)...);
}
template <class Place>
ALWAYS_INLINE Vector shuffle(Vector a, Vector b, Place place) {
  return shuffle(a, b, place, std::make_integer_sequence<int, LANES>{});
}

// In each quarter the lower (upper) two lanes of a and of b: one after another, or in turn.
ALWAYS_INLINE Vector lower_pairs(Vector a, Vector b) {
  return shuffle(a, b, [](int i) { return i - i % 4 + i % 2 + i / 2 % 2 * LANES; });
}
ALWAYS_INLINE Vector upper_pairs(Vector a, Vector b) {
  return shuffle(a, b, [](int i) { return i - i % 4 + i % 2 + i / 2 % 2 * LANES + 2; });
}
ALWAYS_INLINE Vector lower_turns(Vector a, Vector b) {
  return shuffle(a, b, [](int i) { return i - i % 4 + i / 2 % 2 + i % 2 * LANES; });
}
ALWAYS_INLINE Vector upper_turns(Vector a, Vector b) {
  return shuffle(a, b, [](int i) { return i - i % 4 + i / 2 % 2 + i % 2 * LANES + 2; });
}
// The lower (upper) halves of a and b.
ALWAYS_INLINE Vector lower_halves(Vector a, Vector b) {
  return shuffle(a, b, [](int i) { return i % (LANES / 2) + i / (LANES / 2) * LANES; });
}
ALWAYS_INLINE Vector upper_halves(Vector a, Vector b) {
  return shuffle(a, b, [](int i) { return i % (LANES / 2) + i / (LANES / 2) * LANES + LANES / 2; });
}
// The even (odd) quarters of a and b.
ALWAYS_INLINE Vector even_quarters(Vector a, Vector b) {
  return shuffle(a, b, [](int i) { return i / 4 * 8 + i % 4; });
}
ALWAYS_INLINE Vector odd_quarters(Vector a, Vector b) {
  return shuffle(a, b, [](int i) { return i / 4 * 8 + i % 4 + 4; });
}

inline float sum_lanes(Vector v) {
  float sums[LANES];
  std::memcpy(sums, &v, sizeof v);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

typedef Vector Square[LANES];

// LANES vectors: rows become columns. First the quarters, each turned in itself, and then their places.
inline void transpose(Square& v) {
  Square a, b;
  for (int i = 0; i < LANES; i += 2) a[i] = lower_turns(v[i], v[i + 1]), a[i + 1] = upper_turns(v[i], v[i + 1]);
  for (int i = 0; i < LANES; i += 4)
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = lower_pairs(a[i + j], a[i + 2 + j]);
      b[i + 2 * j + 1] = upper_pairs(a[i + j], a[i + 2 + j]);
    }
  for (int i = 0; i < 4; ++i) {
    if constexpr (LANES == 4) {
      v[i] = b[i];
    } else if constexpr (LANES == 8) {
      v[i] = lower_halves(b[i], b[i + 4]), v[i + 4] = upper_halves(b[i], b[i + 4]);
    } else {
      const Vector low[2] = {lower_halves(b[i], b[i + 4]), lower_halves(b[i + 8], b[i + 12])};
      const Vector high[2] = {upper_halves(b[i], b[i + 4]), upper_halves(b[i + 8], b[i + 12])};
      v[i] = even_quarters(low[0], low[1]), v[i + 4] = odd_quarters(low[0], low[1]);
      v[i + 8] = even_quarters(high[0], high[1]), v[i + 12] = odd_quarters(high[0], high[1]);
    }
  }
}

// to[column * to_stride + row] = from[row * from_stride + column] for up to LANES rows and columns.
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
