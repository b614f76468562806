// Unbiased quantisation to 8, 4 or 2 bits, in groups of up to 256 elements of a row:
//
//   q = floor((x - low) / step + u),   step = (high - low) / (2^bits - 1),   u uniform in [0, 1)
//
// A group's low is its minimum rounded down to BF16, its high the maximum rounded up: these are what is stored, so
// that low + q step is x on average, to the last digit. u has 16 bits of a counter-based generator: the numbers depend
// on the key and the element's place only, not on threads. A group with a NaN or an infinity gets NaN for both.
// Byte j of a group of B bytes holds the elements j, j + B, j + 2 B, ...: packing is shift and or of whole vectors.
#include "core.h"
#include "threefry.h"
#include "vector.h"

#include <algorithm>
#include <cmath>
#include <cstring>

typedef uint8_t Bytes __attribute__((vector_size(32)));
constexpr int GROUP = 256;
constexpr int SIDES = 4;  // vectors of counters that are drawn for at once

struct Rows {
  int64_t rows, length;
  int64_t groups() const { return (length + GROUP - 1) / GROUP; }
  int count(int64_t group) const { return static_cast<int>(std::min<int64_t>(GROUP, length - group * GROUP)); }
  int64_t row_bytes(int bits) const {
    const int64_t whole = length / GROUP, rest = length % GROUP;
    return whole * (GROUP * bits / 8) + (rest * bits + 7) / 8;
  }
};

// The largest BF16 number that is not above x, and the smallest that is not below.
static inline uint16_t bfloat_below(float x) {
  const uint32_t bits = bits_of<uint32_t>(x), cut = bits & 0xffffu;
  return static_cast<uint16_t>((bits >> 16) + (cut != 0 && (bits >> 31)));
}
static inline uint16_t bfloat_above(float x) {
  const uint32_t bits = bits_of<uint32_t>(x), cut = bits & 0xffffu;
  return static_cast<uint16_t>((bits >> 16) + (cut != 0 && !(bits >> 31)));
}

// For each of `count` elements of the group with this number: 16 random bits, as a number between 0 and 1.
static inline void draw(Words key, int64_t group, int count, float* u) {
  BitVector lane;
  for (int i = 0; i < LANES; ++i) lane[i] = i;
  const int quarter = (count + 3) / 4;
  const uint64_t first = static_cast<uint64_t>(group) * (GROUP / 4);  // 64 divides it: no carry below
  uint32_t words[2][GROUP / 4 + SIDES * LANES];
  for (int c = 0; c < quarter; c += SIDES * LANES) {
    BitVector a[SIDES], b[SIDES];
    for (int i = 0; i < SIDES; ++i) {
      a[i] = lane + static_cast<uint32_t>(first + c + i * LANES);
      b[i] = BitVector{} + static_cast<uint32_t>(first >> 32);
    }
    threefry(key, a, b);
    std::memcpy(words[0] + c, a, sizeof a);
    std::memcpy(words[1] + c, b, sizeof b);
  }
  for (int part = 0; part < 4; ++part)  // in order: what goes beyond a quarter is overwritten by the next
    for (int c = 0; c < quarter; c += LANES) {
      BitVector w;
      std::memcpy(&w, words[part / 2] + c, sizeof w);
      const IntVector half = bits_of<IntVector>(part % 2 ? w >> 16 : w & 0xffffu);
      store(u + part * quarter + c, __builtin_convertvector(half, Vector) * (1.0f / 65536) + 0.5f / 65536);
    }
}

// Reads up to a vector beyond the last of the codes.
template <int BITS>
static inline void pack(const uint8_t* codes, int count, uint8_t* out) {
  constexpr int PER_BYTE = 8 / BITS;
  const int bytes = (count + PER_BYTE - 1) / PER_BYTE;
  for (int j = 0; j < bytes; j += sizeof(Bytes)) {
    Bytes all = {};
    for (int part = 0; part < PER_BYTE; ++part) {
      Bytes some;
      std::memcpy(&some, codes + j + part * bytes, sizeof some);
      all |= some << (part * BITS);
    }
    if (bytes - j >= static_cast<int>(sizeof all)) std::memcpy(out + j, &all, sizeof all);
    else std::memcpy(out + j, &all, bytes - j);
  }
}

template <int BITS, class T>
static void quantise_group(const T* x, int count, Words key, int64_t group, uint8_t* out, uint16_t* range) {
  constexpr int LEVELS = (1 << BITS) - 1;
  float wide[GROUP + LANES];
  for (int i = 0; i < count; i += LANES) {
    const int lanes = std::min(LANES, count - i);
    store(wide + i, load_part(x + i, lanes, widen(x[0])));  // beyond the end: a value that changes no range
  }
  Vector lows = load(wide), highs = lows, zeros = {};
  for (int i = 0; i < count; i += LANES) {
    const Vector v = load(wide + i);
    lows = v < lows ? v : lows;
    highs = v > highs ? v : highs;
    zeros += v * 0.0f;  // NaN if anything is not finite
  }
  float low = lows[0], high = highs[0], sum = zeros[0];
  for (int i = 1; i < LANES; ++i) low = std::min(low, lows[i]), high = std::max(high, highs[i]), sum += zeros[i];
  range[0] = bfloat_below(low), range[1] = bfloat_above(high);
  low = widen(Bfloat{range[0]}), high = widen(Bfloat{range[1]});
  if (!(sum == 0) || !std::isfinite(low) || !std::isfinite(high) || !std::isfinite(high - low)) {
    range[0] = range[1] = 0x7fc0;
    std::memset(out, 0, (count * BITS + 7) / 8);
    return;
  }
  const float step = (high - low) / LEVELS, inverse = step > 0 ? 1 / step : 0;
  float u[GROUP + 2 * LANES];
  draw(key, group, count, u);
  int32_t wide_codes[GROUP + LANES];
  for (int i = 0; i < count; i += LANES) {
    const Vector place = (load(wide + i) - low) * inverse + load(u + i);  // not below 0: truncation is floor
    IntVector q = __builtin_convertvector(place, IntVector);
    q = q > LEVELS ? IntVector{} + LEVELS : q;
    std::memcpy(wide_codes + i, &q, sizeof q);
  }
  uint8_t codes[GROUP + sizeof(Bytes)];
  for (int i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>(wide_codes[i]);  // narrowed many at a time
  std::memset(codes + count, 0, sizeof(Bytes));
  pack<BITS>(codes, count, out);
}

template <int BITS, class T>
static void dequantise_group(const uint8_t* in, const uint16_t* range, int count, T* x) {
  constexpr int PER_BYTE = 8 / BITS, LEVELS = (1 << BITS) - 1;
  const int bytes = (count + PER_BYTE - 1) / PER_BYTE;
  const float low = widen(Bfloat{range[0]}), step = (widen(Bfloat{range[1]}) - low) / LEVELS;
  float wide[GROUP + LANES];
  for (int part = 0; part < PER_BYTE; ++part)
    for (int j = 0; j < bytes; ++j)
      wide[j + part * bytes] = low + static_cast<float>((in[j] >> (part * BITS)) & LEVELS) * step;
  for (int i = 0; i < count; i += LANES)
    store_part(x + i, load(wide + i), std::min(LANES, count - i));
}

template <class F>
static void with_bits(int bits, F body) {
  if (bits == 8) body(std::integral_constant<int, 8>{});
  if (bits == 4) body(std::integral_constant<int, 4>{});
  if (bits == 2) body(std::integral_constant<int, 2>{});
}

// body(storage type, bits, group's number in all, its bytes, its first element, how many) for each group of each row.
template <class F>
static void each_group(const Rows& shape, int bits, int code, int threads, F body) {
  const int64_t groups = shape.groups(), row_bytes = shape.row_bytes(bits), all = shape.rows * groups;
  with_bits(bits, [&](auto width) {
    with_storage(code, [&](auto kind) {
#pragma omp parallel for num_threads(team(threads, shape.rows * shape.length))
      for (int64_t g = 0; g < all; ++g) {
        const int64_t row = g / groups, group = g % groups;
        body(kind, width, g, row * row_bytes + group * (GROUP * width / 8), row * shape.length + group * GROUP,
             shape.count(group));
      }
    });
  });
}

static void quantise(Address x, int code, int64_t rows, int64_t length, int bits, uint32_t key1, uint32_t key2,
                     Address codes, Address ranges, int threads) {
  each_group({rows, length}, bits, code, threads, [&](auto kind, auto width, int64_t g, int64_t byte, int64_t first,
                                                           int count) {
    quantise_group<decltype(width)::value>(at<decltype(kind)>(x) + first, count, {key1, key2}, g,
                                           at<uint8_t>(codes) + byte, at<uint16_t>(ranges) + 2 * g);
  });
}

static void dequantise(Address codes, Address ranges, int64_t rows, int64_t length, int bits, Address x, int code,
                       int threads) {
  each_group({rows, length}, bits, code, threads, [&](auto kind, auto width, int64_t g, int64_t byte, int64_t first,
                                                           int count) {
    dequantise_group<decltype(width)::value>(at<uint8_t>(codes) + byte, at<uint16_t>(ranges) + 2 * g, count,
                                             at<decltype(kind)>(x) + first);
  });
}

void bind_quantise(nb::module_& m) {
  m.def("quantise", &quantise, Release());
  m.def("dequantise", &dequantise, Release());
}
