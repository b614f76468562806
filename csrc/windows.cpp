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

static void window_places(Address indices, Address places, int64_t count, int64_t high, int64_t wide, int64_t width,
                          const std::array<int64_t, 8>& sizes, int threads) {
  const Windows w(sizes);
#pragma omp parallel for num_threads(team(threads, count))
  for (int64_t line = 0; line < count / wide; ++line) {
    const int64_t row = line % high * w.stride_y - w.padding_y;
    for (int64_t j = 0; j < wide; ++j) {
      const int64_t index = at<int64_t>(indices)[line * wide + j], y = index / width, x = index - y * width;
      const int64_t column = j * w.stride_x - w.padding_x;
      at<uint8_t>(places)[line * wide + j] =
          static_cast<uint8_t>((y - row) / w.dilation_y * w.kernel_x + (x - column) / w.dilation_x);
    }
  }
}

static void window_indices(Address places, Address indices, int64_t count, int64_t high, int64_t wide, int64_t width,
                           const std::array<int64_t, 8>& sizes, int threads) {
  const Windows w(sizes);
#pragma omp parallel for num_threads(team(threads, count))
  for (int64_t line = 0; line < count / wide; ++line) {
    const int64_t row = line % high * w.stride_y - w.padding_y;
    for (int64_t j = 0; j < wide; ++j) {
      const int64_t place = at<uint8_t>(places)[line * wide + j], y = place / w.kernel_x, x = place - y * w.kernel_x;
      at<int64_t>(indices)[line * wide + j] =
          (row + y * w.dilation_y) * width + j * w.stride_x - w.padding_x + x * w.dilation_x;
    }
  }
}

void bind_windows(nb::module_& m) {
  m.def("window_places", &window_places, Release());
  m.def("window_indices", &window_indices, Release());
}
