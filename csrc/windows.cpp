// The place of a maximum in its window, a byte, and its index in the map: one from the other.
#include <nanobind/stl/array.h>

#include <array>

#include "core.h"

struct Windows {
  int64_t kernel_x, stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x;
  explicit Windows(const std::array<int64_t, 8>& z)
      : kernel_x(z[1]), stride_y(z[2]), stride_x(z[3]), padding_y(z[4]), padding_x(z[5]), dilation_y(z[6]),
        dilation_x(z[7]) {}
};

// body(window's number, its first row, its first column) for each of `count` windows, `high` x `wide` of them per map.
template <class F>
static void each_window(int64_t count, int64_t high, int64_t wide, const Windows& w, int threads, F body) {
#pragma omp parallel for num_threads(team(threads, count))
  for (int64_t line = 0; line < count / wide; ++line)
    for (int64_t j = 0; j < wide; ++j)
      body(line * wide + j, line % high * w.stride_y - w.padding_y, j * w.stride_x - w.padding_x);
}

static void window_places(Address indices, Address places, int64_t count, int64_t high, int64_t wide, int64_t width,
                          const std::array<int64_t, 8>& sizes, int threads) {
  const Windows w(sizes);
  each_window(count, high, wide, w, threads, [&](int64_t i, int64_t row, int64_t column) {
    const int64_t index = at<int64_t>(indices)[i], y = index / width, x = index - y * width;
    const int64_t place = (y - row) / w.dilation_y * w.kernel_x + (x - column) / w.dilation_x;
    at<uint8_t>(places)[i] = static_cast<uint8_t>(place);
  });
}

static void window_indices(Address places, Address indices, int64_t count, int64_t high, int64_t wide, int64_t width,
                           const std::array<int64_t, 8>& sizes, int threads) {
  const Windows w(sizes);
  each_window(count, high, wide, w, threads, [&](int64_t i, int64_t row, int64_t column) {
    const int64_t place = at<uint8_t>(places)[i], y = place / w.kernel_x, x = place - y * w.kernel_x;
    at<int64_t>(indices)[i] = (row + y * w.dilation_y) * width + column + x * w.dilation_x;
  });
}

void bind_windows(nb::module_& m) {
  m.def("window_places", &window_places, Release());
  m.def("window_indices", &window_indices, Release());
}
