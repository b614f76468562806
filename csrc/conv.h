// What the dense convolutions share: maps, the meeting of output and source positions, and the FP32 band.
// A band is some rows of one sample's source, widened to FP32, pixels outside and channels inside, with the zeros
// of the padding around it. Every kernel reads its source from a band, so storage and layout end there.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "vector.h"

namespace conv {

struct Map {
  int64_t batch, channels, height, width;
  bool planar;  // [batch][channels][height][width]; else [batch][height][width][channels]

  int64_t at(int64_t n, int64_t c, int64_t y, int64_t x) const {
    return planar ? ((n * channels + c) * height + y) * width + x : ((n * height + y) * width + x) * channels + c;
  }
};

// The sizes of a convolution, in the order in which kernels/conv.py passes them.
using Sizes = std::array<int64_t, 16>;
struct Geometry {
  int64_t batch, in_channels, height, width, out_channels, out_height, out_width, kernel_y, kernel_x;
  int64_t stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x, groups;

  explicit Geometry(const Sizes& s)
      : batch(s[0]), in_channels(s[1]), height(s[2]), width(s[3]), out_channels(s[4]), out_height(s[5]),
        out_width(s[6]), kernel_y(s[7]), kernel_x(s[8]), stride_y(s[9]), stride_x(s[10]), padding_y(s[11]),
        padding_x(s[12]), dilation_y(s[13]), dilation_x(s[14]), groups(s[15]) {}
  Map input(bool planar) const { return {batch, in_channels, height, width, planar}; }
  Map output(bool planar) const { return {batch, out_channels, out_height, out_width, planar}; }
};

// Whether each channel is convolved by itself, as in depthwise convolutions.
inline bool is_depthwise(const Geometry& g) {
  return g.groups > 1 && g.in_channels == g.groups && g.out_channels == g.groups;
}

// One dimension of a convolution: output position start + i step (i < count) reads, for each tap, source position
// i source_step + offset, times the kernel's element k.
struct Tap { int64_t offset, k; };
struct Axis {
  int64_t start, step, count, source_step;
  std::vector<Tap> taps;  // by increasing offset
};
struct Span {  // of the offsets
  int64_t first, last;
  // The source positions that `count` outputs read.
  int64_t reach(int64_t count, int64_t source_step) const { return (count - 1) * source_step + last - first + 1; }
};

inline Axis forward_axis(int64_t count, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
  Axis axis{0, 1, count, stride, {}};
  for (int64_t k = 0; k < kernel; ++k) axis.taps.push_back({k * dilation - padding, k});
  return axis;
}

// The transposed meeting, one axis for each residue of the position modulo the stride: x = residue + i stride was
// read by output i + (residue + padding - k dilation) / stride wherever that is whole.
inline std::vector<Axis> backward_axes(int64_t size, int64_t kernel, int64_t stride, int64_t padding,
                                       int64_t dilation) {
  std::vector<Axis> axes;
  for (int64_t residue = 0; residue < std::min(stride, size); ++residue) {
    Axis axis{residue, stride, (size - residue + stride - 1) / stride, 1, {}};
    for (int64_t k = kernel - 1; k >= 0; --k) {
      const int64_t distance = residue + padding - k * dilation;
      if (distance % stride == 0) axis.taps.push_back({distance / stride, k});
    }
    axes.push_back(axis);
  }
  return axes;
}

inline Span span_of(const std::vector<Axis>& axes) {
  Span span{INT64_MAX, INT64_MIN};
  for (const Axis& axis : axes)
    for (const Tap& tap : axis.taps)
      span = {std::min(span.first, tap.offset), std::max(span.last, tap.offset)};
  return span.first > span.last ? Span{0, 0} : span;
}

// Rows [top, top + rows) and columns [left, left + width) of a sample, `channels` of them from `channel` on; a
// pixel's channels begin `stride` floats after the last pixel's.
struct Band {
  float* data;
  int64_t top, rows, left, width, channel, channels, stride;
  float* row(int64_t i) const { return data + i * width * stride; }
};

// A source, and the batch norm and ReLU that it passes on its way into a band, if any.
template <class T>
struct Source {
  Map map;
  const T* data;
  const float *scale, *shift;  // of each channel, or null
  bool rectify;
};

// z = x scale + shift and ReLU for the channels of a vector; a NaN stays a NaN.
struct Prologue {
  Vector scale, shift, floor;
  Vector operator()(Vector x) const {
    const Vector z = x * scale + shift;
    return z < floor ? floor : z;
  }
};

template <class T>
inline Prologue prologue(const Source<T>& s, int64_t channel, int lanes) {
  return {s.scale ? load_part(s.scale + channel, lanes) : broadcast(1),
          s.shift ? load_part(s.shift + channel, lanes) : Vector{}, broadcast(s.rectify ? 0 : -INFINITY)};
}

// `count` pixels of one source row, from x on, into the band at `out`.
template <class T>
void widen_row(const Source<T>& s, int64_t n, int64_t y, int64_t x, int64_t count, const Band& band, float* out) {
  const int64_t plane = s.map.height * s.map.width;
  for (int64_t c = 0; c < band.channels; c += LANES) {
    const int lanes = static_cast<int>(std::min<int64_t>(LANES, band.channels - c));
    const Prologue prepare = prologue(s, band.channel + c, lanes);
    const T* from = s.data + s.map.at(n, band.channel + c, y, x);
    float* to = out + c;
    if (!s.map.planar) {
      for (int64_t i = 0; i < count; ++i)
        store_part(to + i * band.stride, prepare(load_part(from + i * s.map.channels, lanes)), lanes);
      continue;
    }
    for (int64_t i = 0; i < count; i += LANES) {
      const int few = static_cast<int>(std::min<int64_t>(LANES, count - i));
      Square square;
      for (int k = 0; k < LANES; ++k) {
        square[k] = k < lanes ? load_part(from + k * plane + i, few) : Vector{};
        __builtin_prefetch(from + k * plane + i + s.map.width);  // the next row: the CPU does not follow so many planes
      }
      transpose(square);
      for (int k = 0; k < few; ++k) store_part(to + (i + k) * band.stride, prepare(square[k]), lanes);
    }
  }
}

template <class T>
void fill_row(const Source<T>& s, int64_t n, const Band& band, int64_t i) {
  const int64_t y = band.top + i, W = s.map.width;
  float* out = band.row(i);
  const auto zero = [&](int64_t from, int64_t to) { std::fill(out + from * band.stride, out + to * band.stride, 0.0f); };
  if (y < 0 || y >= s.map.height) return zero(0, band.width);
  // What the source has of [left, right): nothing where the band lies in the padding alone.
  const int64_t right = band.left + band.width;
  const int64_t from = std::clamp<int64_t>(0, band.left, right), to = std::clamp<int64_t>(W, from, right);
  zero(0, from - band.left);
  widen_row(s, n, y, from, to - from, band, out + (from - band.left) * band.stride);
  zero(to - band.left, band.width);
}

// Whole rows of a planar source lie one after another: vectors that run on over their ends are full on narrow maps too.
template <class T>
void widen_rows(const Source<T>& s, int64_t n, int64_t first, int64_t last, const Band& band) {
  const int64_t plane = s.map.height * s.map.width, count = (last - first) * s.map.width;
  for (int64_t c = 0; c < band.channels; c += LANES) {
    const int lanes = static_cast<int>(std::min<int64_t>(LANES, band.channels - c));
    const Prologue prepare = prologue(s, band.channel + c, lanes);
    const T* from = s.data + s.map.at(n, band.channel + c, first, 0);
    float* to = band.row(first - band.top) - band.left * band.stride + c;
    int64_t x = 0;
    for (int64_t i = 0; i < count; i += LANES) {
      const int few = static_cast<int>(std::min<int64_t>(LANES, count - i));
      Square square;
      for (int k = 0; k < LANES; ++k) square[k] = k < lanes ? load_part(from + k * plane + i, few) : Vector{};
      transpose(square);
      for (int k = 0; k < few; ++k, to += band.stride) {
        store_part(to, prepare(square[k]), lanes);
        if (++x == s.map.width) x = 0, to += (band.width - s.map.width) * band.stride;
      }
    }
  }
}

// All rows of a band.
template <class T>
void fill_band(const Source<T>& s, int64_t n, const Band& band) {
  const int64_t W = s.map.width, H = s.map.height, right = band.left + band.width;
  if (!s.map.planar || W % LANES == 0 || band.left > 0 || right < W) {
    for (int64_t i = 0; i < band.rows; ++i) fill_row(s, n, band, i);
    return;
  }
  const int64_t first = std::clamp<int64_t>(0, band.top, band.top + band.rows);
  const int64_t last = std::clamp<int64_t>(H, first, band.top + band.rows);
  float *above = band.row(first - band.top), *below = band.row(last - band.top);
  std::fill(band.data, above, 0.0f);
  for (float* row = above; row < below; row += band.width * band.stride) {
    std::fill(row, row - band.left * band.stride, 0.0f);
    std::fill(row + (W - band.left) * band.stride, row + band.width * band.stride, 0.0f);
  }
  std::fill(below, band.row(band.rows), 0.0f);
  if (first < last) widen_rows(s, n, first, last, band);
}
}  // namespace conv
