// How a convolution, or the gradient of its input, reads its source: which rows and columns, where they lie in scratch.
//
// Both are one computation: out(classes * i + class) = sum over kernel positions of w * source(step * (i + shift) + phase).
// The convolution has step = stride and one class. Its transpose has step 1 and `stride` classes, and a kernel position
// belongs to one of them. In scratch the source is split into its phases ("planes"), so that neighbours in the grid i
// are neighbours in memory whatever the stride.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>

#include "core.h"
#include "vector.h"

inline int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// What Python passes: the sizes of a convolution.
enum { SAMPLES, IN_CHANNELS, IN_H, IN_W, OUT_CHANNELS, OUT_H, OUT_W, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W,
       PADDING_H, PADDING_W, DILATION_H, DILATION_W, SIZES };
using Sizes = std::array<int64_t, SIZES>;

struct Tap { int64_t klass, plane, shift; };

// One dimension.
struct Axis {
  int64_t in, out, kernel, stride, padding, dilation;
  bool transposed;
  int64_t low, high;  // the smallest and the largest shift

  Axis(const Sizes& sizes, int dimension, bool transposed)
      : in(sizes[IN_H + dimension]), out(sizes[OUT_H + dimension]), kernel(sizes[KERNEL_H + dimension]),
        stride(sizes[STRIDE_H + dimension]), padding(sizes[PADDING_H + dimension]),
        dilation(sizes[DILATION_H + dimension]), transposed(transposed), low(INT64_MAX), high(INT64_MIN) {
    for (int64_t k = 0; k < kernel; ++k) low = std::min(low, tap(k).shift), high = std::max(high, tap(k).shift);
  }
  int64_t step() const { return transposed ? 1 : stride; }
  int64_t classes() const { return transposed ? stride : 1; }
  int64_t source_size() const { return transposed ? out : in; }
  int64_t written_size() const { return transposed ? in : out; }
  int64_t grid() const { return divide_up(written_size(), classes()); }
  int64_t halo() const { return high - low; }
  int64_t planes() const { return transposed ? 1 : std::min(kernel, period()); }
  int64_t phase(int64_t plane) const { return transposed ? 0 : modulo(plane * dilation - padding, stride); }

  Tap tap(int64_t k) const {
    const int64_t lead = k * dilation - padding;  // in = stride * out + lead
    if (!transposed) return {0, k % period(), divide_down(lead, stride)};
    const int64_t klass = modulo(lead, stride);
    return {klass, 0, (klass - lead) / stride};
  }

 private:
  int64_t period() const {  // kernel positions this far apart read the same phase
    int64_t a = stride, b = dilation;
    while (b) { const int64_t rest = a % b; a = b; b = rest; }
    return stride / a;
  }
};

constexpr int64_t TILE_VECTORS = 8, LEAST_VECTORS = 2, SOURCE_BYTES = 40 << 10, CACHE_BYTES = 26 << 10;

// The layout of the source in scratch. Two forms:
// whole rows: a row is padded to whole vectors, or to half of one, a tile is one or more rows, and the one-pixel shifts
//   of a three-wide kernel are made in registers, so that loads are aligned (to half a vector where rows are that long);
// flat: rows with their margins follow one another, a tile is any neighbours, and a load may be unaligned: any width,
//   kernel and dilation.
struct Geometry {
  Axis h, w;
  int64_t samples, channels, lines;  // channels are read, lines are written
  bool whole_rows;
  int64_t row, tile_vectors;  // `row` in floats
  int64_t band_rows;  // rows of the grid for which the source is in scratch at one time
  int64_t plane, channel;  // floats
  int64_t chunk_channels;  // so many channels of one tile's source fit the nearest cache

  Geometry(const Sizes& sizes, bool transposed)
      : h(sizes, 0, transposed), w(sizes, 1, transposed), samples(sizes[SAMPLES]),
        channels(sizes[transposed ? OUT_CHANNELS : IN_CHANNELS]),
        lines(sizes[transposed ? IN_CHANNELS : OUT_CHANNELS]) {
    const int64_t width = std::max(w.grid(), divide_up(w.source_size(), w.step()));
    const bool shifts = w.low < 0 || w.high > 0;
    whole_rows = shifts && w.low >= -1 && w.high <= 1 && width <= LANES * TILE_VECTORS;
    row = !whole_rows ? w.grid() + w.halo() : width <= LANES / 2 ? LANES / 2 : round_up(width, LANES);
    tile_vectors = whole_rows ? LANES * TILE_VECTORS / row * row / LANES : TILE_VECTORS;
    if (!whole_rows || row < LANES)  // a small map fills fewer vectors than a tile may have
      while (tile_vectors > LEAST_VECTORS && floats(h.grid()) <= tile_vectors / 2 * LANES) tile_vectors /= 2;
    const int64_t tile_rows = whole_rows ? tile_vectors * LANES / row : 1;
    const int64_t row_bytes = channels * h.planes() * w.planes() * row * 4;
    const int64_t rows = SOURCE_BYTES / std::max<int64_t>(row_bytes, 1) - h.halo();
    band_rows = std::min(round_up(h.grid(), tile_rows), std::max(tile_rows, rows / tile_rows * tile_rows));
    plane = round_up(tiles(band_rows) * tile_vectors * LANES + h.halo() * row + (whole_rows ? 0 : w.halo()), LANES);
    channel = plane * h.planes() * w.planes();
    const int64_t tile_bytes = (tile_vectors * LANES + h.halo() * row) * h.planes() * w.planes() * 4;
    const int64_t fitting = std::max<int64_t>(1, CACHE_BYTES / tile_bytes);
    chunk_channels = std::max<int64_t>(1, divide_up(channels, divide_up(channels, fitting)));
  }
  int64_t chunks() const { return divide_up(channels, chunk_channels); }
  int64_t floats(int64_t rows) const { return (rows - 1) * row + (whole_rows ? row : w.grid()); }  // first to last
  int64_t tiles(int64_t rows) const { return divide_up(floats(rows), tile_vectors * LANES); }
  int64_t classes() const { return h.classes() * w.classes(); }
  int64_t shifts() const { return whole_rows ? 3 : 1; }  // by -1, 0, 1; or not grouped
  int64_t groups() const { return classes() * shifts(); }
  int64_t left() const { return whole_rows ? 0 : w.low; }  // the grid column of a row's first float

  // Kernel position k: its group, and the byte offset from a tile's first float within a channel.
  int64_t group(int64_t k) const {
    const Tap y = h.tap(k / w.kernel), x = w.tap(k % w.kernel);
    return (y.klass * w.classes() + x.klass) * shifts() + (whole_rows ? x.shift + 1 : 0);
  }
  int64_t offset(int64_t k) const {
    const Tap y = h.tap(k / w.kernel), x = w.tap(k % w.kernel);
    const int64_t column = whole_rows ? 0 : x.shift - w.low;
    return ((y.plane * w.planes() + x.plane) * plane + (y.shift - h.low) * row + column) * 4;
  }
};

// How threads share the work: `samples` groups of samples times `lines` groups of lines.
struct Split { int64_t samples, lines; };

// The cheapest split by a rough count of cycles: a tile's nonzero, a nonzero decoded, a vector of the source copied.
inline Split share(const Geometry& g, int64_t nonzeros, int64_t threads, int64_t block) {
  Split best{threads, 1};
  double least = 1e300;
  for (int64_t lines = 1; lines <= threads; ++lines) {
    if (threads % lines) continue;
    const double mine = static_cast<double>(nonzeros) / lines, bands = divide_up(g.h.grid(), g.band_rows);
    const double tiles = bands * g.tiles(g.band_rows), copies = std::max(1.0, mine / block);
    const double sample = tiles * mine * 5 + copies * bands * g.channels * g.channel / LANES * 2;
    const double cycles = mine * 8 + divide_up(g.samples, threads / lines) * sample;
    if (cycles < least) least = cycles, best = {threads / lines, lines};
  }
  return best;
}
