// Where a tile lies in a map, and how it goes there.
#pragma once
#include "sparse_source.h"
#include "sparse_tile.h"

// The floats [start, start + LANES * NV) of a band that holds the grid rows [rows.begin, rows.end).
struct Tile {
  int64_t start;
  Range rows;
};

enum class Placement {
  STRETCH,   // a stretch of the map's memory: rows without margins, one class
  ZIPPED,    // the columns of two classes alternate in a stretch of every `classes`-th row
  SCATTERED  // pixel by pixel
};

template <int ROW, int NV>
Placement placement_of(const Geometry& g, const Tile& tile) {
  const bool whole = (tile.rows.end - tile.rows.begin) * g.row - tile.start >= LANES * NV;
  if (whole && g.classes() == 1 && g.row == g.w.written_size()) return Placement::STRETCH;
  if (whole && ROW > 0 && g.w.classes() == 2 && 2 * g.row == g.w.written_size() &&
      g.h.written_size() % g.h.classes() == 0)
    return Placement::ZIPPED;
  return Placement::SCATTERED;
}

// visit(float of the tile, pixel of the map) for every pixel of a tile that exists.
template <class Visit>
void each_pixel(const Geometry& g, const Tile& tile, int64_t floats, int64_t klass, Visit visit) {
  for (int64_t f = 0; f < floats; ++f) {
    const int64_t i = tile.rows.begin + (tile.start + f) / g.row, j = (tile.start + f) % g.row;
    const int64_t y = i * g.h.classes() + klass / g.w.classes(), x = j * g.w.classes() + klass % g.w.classes();
    if (i < tile.rows.end && j < g.w.grid() && y < g.h.written_size() && x < g.w.written_size())
      visit(f, y * g.w.written_size() + x);
  }
}

template <class T, int NV>
void scatter(const Geometry& g, const Tile& tile, const float* floats, T* map, int64_t klass) {
  T few[LANES * NV];
  for (int v = 0; v < NV; ++v) store(few + LANES * v, load(floats + LANES * v));
  each_pixel(g, tile, LANES * NV, klass, [&](int64_t f, int64_t pixel) { map[pixel] = few[f]; });
}

// The columns of the even class are in `even`, those of the odd one, klass, follow it.
template <class T, int ROW, int NV>
void zip(const Geometry& g, const Tile& tile, const float* even, T* map, int64_t klass) {
  const int64_t row = tile.rows.begin + tile.start / g.row, width = g.w.written_size();
  const auto at = [&](int pixel) {
    return map + ((row + pixel / ROW) * g.h.classes() + klass / 2) * width + 2 * (pixel % ROW);
  };
  for (int pixel = 0; pixel < LANES * NV; pixel += LANES) {
    const Vector a = load(even + pixel), b = load(even + LANES * NV + pixel);
    store(at(pixel), shuffle(a, b, [](int i) { return i / 2 + i % 2 * LANES; }));
    store(at(pixel + LANES / 2), shuffle(a, b, [](int i) { return LANES / 2 + i / 2 + i % 2 * LANES; }));
  }
}

// A tile of one line and class that is not a stretch: `floats` holds it, after those of the line's other classes.
template <class T, int ROW, int NV>
void store_apart(const Geometry& g, const Tile& tile, Placement placement, const float* floats, T* map, int64_t klass) {
  if constexpr (ROW > 0) {
    if (placement == Placement::ZIPPED && klass % 2) return zip<T, ROW, NV>(g, tile, floats - LANES * NV, map, klass);
  }
  if (placement == Placement::SCATTERED) scatter<T, NV>(g, tile, floats, map, klass);
}

template <class T, int NV>
void gather_pixels(const Geometry& g, const Tile& tile, const T* map, Vector (&out)[NV]) {
  T few[LANES * NV] = {};
  each_pixel(g, tile, LANES * NV, 0, [&](int64_t f, int64_t pixel) { few[f] = map[pixel]; });
  for (int v = 0; v < NV; ++v) out[v] = load(few + LANES * v);
}
