// The source of a convolution in FP32 scratch: one band of one sample, laid out as Geometry says.
#pragma once
#include "sparse_geometry.h"
#include "sparse_work.h"

struct Prologue {  // x -> relu(x * scale + shift), each channel with its own; or x as it is
  const float* scale;
  const float* shift;
};

// Up to LANES pixels, `step` apart. No value behind the last of them is read.
template <int STEP, class T>
inline Vector load_apart(const T* source, int64_t step, int lanes) {
  if (STEP == 1) return load_part(source, lanes);
  if (STEP == 2 && lanes <= LANES / 2) {
    const Vector all = load_part(source, 2 * lanes - 1);
    return shuffle(all, all, [](int i) { return 2 * i; });
  }
  if (STEP == 2) {
    const Vector more = load_part(source + LANES - 1, 2 * lanes - LANES);
    return shuffle(load(source), more, [](int i) { return i < LANES / 2 ? 2 * i : 2 * i + 1; });
  }
  T few[LANES] = {};
  for (int i = 0; i < lanes; ++i) few[i] = source[i * step];
  return load(few);
}

// Rows of `count` pixels, `step` apart in the source, side by side in scratch; `ahead` is what is copied next.
struct Rows { int64_t rows, count, step, source_stride, stride, ahead; };

template <int STEP, class T, class Activate>
void copy_rows(const T* source, const Rows& r, Activate activate, float* out) {
  for (int64_t i = 0; i < r.rows; ++i, source += r.source_stride, out += r.stride) {
    int64_t j = 0;
    for (; j + LANES <= r.count; j += LANES) {
      __builtin_prefetch(source + j * r.step + r.ahead);
      store(out + j, activate(load_apart<STEP>(source + j * r.step, r.step, LANES)));
    }
    const int rest = static_cast<int>(r.count - j);
    if (rest) store_part(out + j, activate(load_apart<STEP>(source + j * r.step, r.step, rest)), rest);
  }
}

template <int STEP, class T>
void copy_channel(const T* source, const Rows& rows, const Prologue& prologue, int64_t channel, float* out) {
  if (!prologue.scale) return copy_rows<STEP>(source, rows, [](Vector x) { return x; }, out);
  const Vector scale = broadcast(prologue.scale[channel]), shift = broadcast(prologue.shift[channel]);
  const auto activate = [=](Vector x) {
    x = x * scale + shift;
    return x < 0 ? Vector{} : x;  // a NaN stays
  };
  copy_rows<STEP>(source, rows, activate, out);
}

// The part of [0, size) of a plane's axis that exists in the source: `first` is the grid place of index 0.
inline Range existing(const Axis& axis, int64_t plane, int64_t first, int64_t size) {
  const int64_t phase = axis.phase(plane), step = axis.step();
  const int64_t begin = std::min(size, std::max<int64_t>(0, divide_up(-phase, step) - first));
  return {begin, std::max(begin, std::min(size, divide_up(axis.source_size() - phase, step) - first))};
}

// The rows of one sample that the grid rows [begin, begin + band_rows) read. Margins were zeroed once and are not
// touched; where there are several bands, rows beyond the map are zeroed here, for another band has filled them.
template <class T>
void load_band(const Geometry& g, const T* sample, int64_t begin, const Prologue& prologue, float* scratch) {
  const int64_t all = g.band_rows + g.h.halo(), width = g.w.source_size(), step = g.w.step();
  for (int64_t p = 0; p < g.h.planes() * g.w.planes(); ++p) {
    const int64_t plane_y = p / g.w.planes(), plane_x = p % g.w.planes();
    const Range y = existing(g.h, plane_y, begin + g.h.low, all), x = existing(g.w, plane_x, g.left(), g.row);
    const T* source = sample + (g.h.step() * (begin + g.h.low + y.begin) + g.h.phase(plane_y)) * width +
                      step * (g.left() + x.begin) + g.w.phase(plane_x);
    Rows rows{y.end - y.begin, x.end - x.begin, step, g.h.step() * width, g.row, g.h.source_size() * width};
    if (step == 1 && rows.count == rows.stride && rows.source_stride == rows.stride)  // one stretch of memory
      rows.count *= rows.rows, rows.rows = std::min<int64_t>(rows.rows, 1);
    float* plane = scratch + p * g.plane;
    for (int64_t c = 0; c < g.channels; ++c, source += g.h.source_size() * width, plane += g.channel) {
      if (g.band_rows < g.h.grid()) {
        std::fill(plane, plane + y.begin * g.row, 0.f);
        std::fill(plane + y.end * g.row, plane + all * g.row, 0.f);
      }
      float* out = plane + y.begin * g.row + x.begin;
      if (step == 1) copy_channel<1>(source, rows, prologue, c, out);
      else if (step == 2) copy_channel<2>(source, rows, prologue, c, out);
      else copy_channel<0>(source, rows, prologue, c, out);
    }
  }
}
