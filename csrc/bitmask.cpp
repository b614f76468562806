// One bit an element: what ReLU and dropout need of their input, 1/32 of the FP32 map.
// Bit i of byte j stands for element 8 j + i; the last byte is padded with zeros.
#include <algorithm>

#include "core.h"
#include "vector.h"

namespace {

constexpr int64_t PIECE = 16;  // elements, in two bytes of bits, at a time

// One bit a lane of a comparison, the first lane's lowest.
inline uint32_t lane_bits(IntVector where) {
#if defined(__AVX512DQ__) && CORE_LANES == 16
  return _mm512_movepi32_mask(bits_of<__m512i>(where));
#elif defined(__AVX2__) && CORE_LANES == 8
  return static_cast<uint32_t>(_mm256_movemask_ps(bits_of<__m256>(where)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < LANES; ++i) bits |= static_cast<uint32_t>(where[i] & 1) << i;
  return bits;
#endif
}

// Where x is not <= 0: what ReLU lets pass, a NaN too.
template <class T>
void positive(const T* x, uint8_t* out, int64_t numel, int threads) {
  const int64_t whole = numel / PIECE;
#pragma omp parallel for num_threads(team(threads, whole))
  for (int64_t j = 0; j < whole; ++j) {
    uint32_t bits = 0;
    for (int part = 0; part < PIECE; part += LANES) bits |= lane_bits(~(load(x + j * PIECE + part) <= Vector{})) << part;
    out[2 * j] = static_cast<uint8_t>(bits), out[2 * j + 1] = static_cast<uint8_t>(bits >> 8);
  }
  std::fill(out + 2 * whole, out + (numel + 7) / 8, uint8_t{0});
  for (int64_t i = whole * PIECE; i < numel; ++i)
    out[i / 8] |= static_cast<uint8_t>(!(widen(x[i]) <= 0) << (i % 8));
}

// The elements that have a bit; the others are zero, whatever they are. By their bits alone, U being as wide as they.
template <class U>
void where(const U* in, const uint8_t* bits, U* out, int64_t numel, int threads) {
  typedef U Elements __attribute__((vector_size(PIECE * sizeof(U))));
  const int64_t whole = numel / PIECE;
  Elements place;
  for (int i = 0; i < PIECE; ++i) place[i] = static_cast<U>(1u << i);
#pragma omp parallel for num_threads(team(threads, whole))
  for (int64_t j = 0; j < whole; ++j) {
    const U both = static_cast<U>(bits[2 * j] | bits[2 * j + 1] << 8);
    Elements elements;
    std::memcpy(&elements, in + j * PIECE, sizeof elements);
    elements &= bits_of<Elements>(((Elements{} + both) & place) != 0);
    std::memcpy(out + j * PIECE, &elements, sizeof elements);
  }
  for (int64_t i = whole * PIECE; i < numel; ++i) out[i] = bits[i / 8] >> (i % 8) & 1 ? in[i] : U{0};
}
}  // namespace

static void positive_bits(Address x, int storage, Address bits, int64_t numel, int threads) {
  with_storage(storage, [&](auto type) { positive(at<decltype(type)>(x), at<uint8_t>(bits), numel, threads); });
}

static void where_bits(Address in, Address bits, Address out, int bytes, int64_t numel, int threads) {
  if (bytes == 4) where(at<uint32_t>(in), at<uint8_t>(bits), at<uint32_t>(out), numel, threads);
  if (bytes == 2) where(at<uint16_t>(in), at<uint8_t>(bits), at<uint16_t>(out), numel, threads);
}

static void pack_bits(Address mask, Address bits, int64_t numel, int threads) {
  const uint8_t* in = at<uint8_t>(mask);
  uint8_t* out = at<uint8_t>(bits);
  const int64_t whole = numel / 8;
#pragma omp parallel for num_threads(threads) if (whole > 1 << 14)
  for (int64_t j = 0; j < whole; ++j) {
    uint8_t byte = 0;
    for (int i = 0; i < 8; ++i) byte |= static_cast<uint8_t>((in[8 * j + i] != 0) << i);
    out[j] = byte;
  }
  if (numel % 8) {
    uint8_t byte = 0;
    for (int64_t i = 8 * whole; i < numel; ++i) byte |= static_cast<uint8_t>((in[i] != 0) << (i % 8));
    out[whole] = byte;
  }
}

static void unpack_bits(Address bits, Address mask, int64_t numel, int threads) {
  const uint8_t* in = at<uint8_t>(bits);
  uint8_t* out = at<uint8_t>(mask);
#pragma omp parallel for num_threads(threads) if (numel > 1 << 17)
  for (int64_t i = 0; i < numel; ++i) out[i] = (in[i / 8] >> (i % 8)) & 1;
}

void bind_bitmask(nb::module_& m) {
  m.def("pack_bits", &pack_bits, Release());
  m.def("unpack_bits", &unpack_bits, Release());
  m.def("positive_bits", &positive_bits, Release());
  m.def("where_bits", &where_bits, Release());
}
