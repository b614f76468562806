// The nonzeros of a few lines at a time, decoded from the index into bounded scratch and sorted for the kernels.
// A line is an output of the kernel that reads it: a row of the weight, or a column (an input channel) if transposed.
#pragma once
#include <algorithm>

#include "sparse_index.h"
#include "vector.h"

// Hands out pieces of one scratch tensor; with no base it only counts, so that one code sizes and carves it.
struct Arena {
  uint8_t* base;
  int64_t used = 0;
  template <class T>
  T* take(int64_t count) {
    T* piece = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }
};

struct Weighted { float weight; int32_t offset; };  // offset in bytes from the tile's first vector
struct Ranked { int32_t rank, offset; };            // rank: which nonzero; -1 fills a group of ROUND up

inline void fill(Weighted& entry, float weight, int64_t, int32_t offset) { entry = {weight, offset}; }
inline void fill(Ranked& entry, float, int64_t rank, int32_t offset) { entry = {static_cast<int32_t>(rank), offset}; }

struct Nonzeros {
  Index index;
  const void* values;
  int code;  // storage of the values, as in with_storage
  int64_t count, rows, row_length;
  bool transposed;
  int64_t positions_per_line;  // of one row: all of them, or the kernel positions of one input channel
  int64_t lines() const { return transposed ? row_length / positions_per_line : rows; }
  int64_t longest_line() const { return transposed ? rows * positions_per_line : row_length; }
};

// Entry is Weighted or Ranked; every bin of Ranked entries is filled up to a multiple of ROUND.
template <class Entry, int ROUND>
class Blocks {
 public:
  int32_t* bin_of;     // of each position in a row: its bin within the line (transposed: line * bins_per_line + bin)
  int32_t* offset_of;  // and where it reads
  Entry* entries;
  int32_t* starts;     // bin b of line l: entries [starts[(l - first) * bins + b], starts[... + 1])
  int64_t first = 0, last = 0;

  Blocks(const Nonzeros& nonzeros, int bins_per_line, int64_t row_offset, int64_t lines, int64_t budget, Arena& arena)
      : from(nonzeros), bins(bins_per_line), row_offset(row_offset) {
    const int64_t slack = ROUND > 1 ? lines * bins * (ROUND - 1) : 0;
    const int64_t longest = nonzeros.longest_line() + (ROUND - 1) * bins;
    capacity = std::min(std::max(budget, longest), nonzeros.count + slack);
    bin_of = arena.take<int32_t>(nonzeros.row_length);
    offset_of = arena.take<int32_t>(nonzeros.row_length);
    entries = arena.take<Entry>(capacity);
    starts = arena.take<int32_t>(lines * bins + 1);
    places = arena.take<int32_t>(lines * bins + 1);
    cursors = nonzeros.transposed ? arena.take<Cursor>(nonzeros.rows) : nullptr;
  }

  int64_t size() const { return capacity; }

  // Before the first block of lines [line, end).
  void begin(int64_t line, int64_t end) {
    first = last = line;
    stop = end;
    if (from.transposed) {
      Cursor walker;
      for (int64_t row = 0; row < from.rows; ++row) {
        const int64_t start = row * from.row_length;
        skip(from.index, walker, start);
        cursors[row] = walker;
        skip(from.index, cursors[row], start + line * from.positions_per_line);
      }
    } else {
      cursor = Cursor{};
      skip(from.index, cursor, line * from.row_length);
    }
  }

  // Decodes as many further lines as fit; false when none are left.
  bool next() {
    first = last;
    if (first >= stop) return false;
    const int64_t average = from.count / from.lines() + 1;
    last = std::min(stop, first + std::max<int64_t>(1, capacity / average));
    count_bins();
    with_storage(from.code, [&](auto tag) { place(static_cast<const decltype(tag)*>(from.values)); });
    return true;
  }

 private:
  Nonzeros from;
  int bins;
  int64_t row_offset, capacity, stop = 0;
  int32_t* places;
  Cursor cursor;
  Cursor* cursors;

  // visit(bin, offset, rank) for the nonzeros of lines [first, last)
  template <bool ADVANCE, class Visit>
  void each(Visit visit) {
    const int64_t length = from.row_length;
    if (from.transposed) {
      for (int64_t row = 0; row < from.rows; ++row) {
        Cursor at = cursors[row];
        const int64_t start = row * length, shift = row * row_offset, base = first * bins;
        walk(from.index, at, start + last * from.positions_per_line, [&](int64_t position, int64_t rank) {
          visit(bin_of[position - start] - base, static_cast<int32_t>(offset_of[position - start] + shift), rank);
        });
        if (ADVANCE) cursors[row] = at;
      }
      return;
    }
    Cursor at = cursor;
    for (int64_t line = first; line < last; ++line) {
      const int64_t start = line * length, base = (line - first) * bins;
      walk(from.index, at, start + length, [&](int64_t position, int64_t rank) {
        visit(base + bin_of[position - start], offset_of[position - start], rank);
      });
    }
    if (ADVANCE) cursor = at;
  }

  // Counts the entries of each bin, and takes lines back until the rest fits.
  void count_bins() {
    const int64_t all = (last - first) * bins;
    std::fill(starts, starts + all + 1, 0);
    each<false>([&](int64_t bin, int32_t, int64_t) { ++starts[bin + 1]; });
    int64_t fitting = 0;
    for (int64_t line = 0; line < last - first; ++line) {
      for (int64_t bin = line * bins; bin < (line + 1) * bins; ++bin)
        starts[bin + 1] = starts[bin] + (starts[bin + 1] + ROUND - 1) / ROUND * ROUND;
      if (starts[(line + 1) * bins] > capacity) break;
      fitting = line + 1;
    }
    last = first + fitting;
  }

  // Every other bin is filled backwards: the kernel then turns round at its end, and meets what is still in the cache.
  template <class T>
  void place(const T* values) {
    const int64_t all = (last - first) * bins;
    for (int64_t bin = 0; bin < all; ++bin) places[bin] = bin % 2 ? starts[bin + 1] - 1 : starts[bin];
    if (ROUND > 1) std::fill(entries, entries + starts[all], Entry{-1, 0});
    each<true>([&](int64_t bin, int32_t offset, int64_t rank) {
      fill(entries[places[bin]], values ? scalar(values[rank]) : 0.f, rank, offset);
      places[bin] += bin % 2 ? -1 : 1;
    });
  }

  static float scalar(float value) { return value; }
  template <class T>
  static float scalar(const T& value) { return load_part(&value, 1)[0]; }
};
