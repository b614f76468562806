// One bit an element: what ReLU and dropout need of their input, 1/32 of the FP32 map.
// Bit i of byte j stands for element 8 j + i; the last byte is padded with zeros.
#include "core.h"

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
}
