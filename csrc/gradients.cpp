// What a step asks of its gradients before they are used: are they finite, and how long are they. No temporaries.
#include <algorithm>
#include <cmath>

#include "core.h"
#include "doubles.h"

namespace {
constexpr int64_t STRIP = 1 << 14;  // values looked at before stopping is considered, or summed into one total

// The largest magnitude as bits: Inf and NaN have an exponent of all ones, and so are above all other numbers.
template <class Bits>
Bits most_bits(const Bits* p, int64_t count) {
  constexpr Bits MAGNITUDE = static_cast<Bits>(~(Bits{1} << (8 * sizeof(Bits) - 1)));
  Bits most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Bits bits = p[i] & MAGNITUDE;
    most = bits > most ? bits : most;
  }
  return most;
}

template <class Bits>
bool all_below(const Bits* p, int64_t numel, Bits infinity, int threads) {
  const int64_t strips = (numel + STRIP - 1) / STRIP;
  bool below = true;
#pragma omp parallel for num_threads(threads) schedule(static) if (strips > 1) reduction(&& : below)
  for (int64_t strip = 0; strip < strips; ++strip)
    if (below) below = most_bits(p + strip * STRIP, std::min(STRIP, numel - strip * STRIP)) < infinity;
  return below;
}

template <class T>
double sum_of_squares(const T* p, int64_t count) {
  Doubles sums[2] = {};
  const auto add = [&](Vector v) {
    Doubles halves[2];
    in_doubles(v, halves);
    for (int half = 0; half < 2; ++half) sums[half] += halves[half] * halves[half];
  };
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) add(load(p + i));
  if (i < count) add(load_part(p + i, static_cast<int>(count - i)));
  const Doubles sum = sums[0] + sums[1];
  double total = 0;
  for (int i = 0; i < DOUBLES; i += 2) total += sum[i] + sum[i + 1];
  return total;
}
}  // namespace

static bool all_finite(Address x, int storage, int64_t numel, int threads) {
  if (storage == 0) return all_below<int32_t>(at<int32_t>(x), numel, 0x7f800000, threads);
  return all_below<int16_t>(at<int16_t>(x), numel, storage == 1 ? 0x7c00 : 0x7f80, threads);
}

// `totals` is scratch for one double a strip: added in order, the sum does not depend on the number of threads.
static double squared_norm(Address x, int storage, int64_t numel, Address totals, int threads) {
  const int64_t strips = (numel + STRIP - 1) / STRIP;
  with_storage(storage, [&](auto type) {
    const auto* p = at<decltype(type)>(x);
#pragma omp parallel for num_threads(threads) schedule(static) if (strips > 1)
    for (int64_t strip = 0; strip < strips; ++strip)
      at<double>(totals)[strip] = sum_of_squares(p + strip * STRIP, std::min(STRIP, numel - strip * STRIP));
  });
  double sum = 0;
  for (int64_t strip = 0; strip < strips; ++strip) sum += at<double>(totals)[strip];
  return sum;
}

void bind_gradients(nb::module_& m) {
  m.def("all_finite", &all_finite, Release());
  m.def("squared_norm", &squared_norm, Release());
}
