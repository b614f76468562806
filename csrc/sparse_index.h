// Where the nonzeros of a weight are: the positions in a flat, row-major weight, in rising order, as the smaller of
//   a bitmap: bit i of byte j stands for position 8 j + i;
//   gaps: a byte for each nonzero, the zeros skipped before it (0-254); 255 skips 255 zeros and is no nonzero.
// Gaps are used only where they are strictly shorter, so that the length alone tells which of the two it is.
#pragma once
#include <cstdint>
#include <cstring>

struct Index {
  const uint8_t* bytes;
  int64_t size;
  int64_t numel;
  bool is_bitmap() const { return size == (numel + 7) / 8; }
};

constexpr int64_t ESCAPE = 255;

// A place between two nonzeros: everything before `position` has been passed, and `rank` nonzeros with it.
struct Cursor {
  int64_t position = 0;
  int64_t byte = 0;  // of gaps: the next one
  int64_t rank = 0;
};

// The bits at [position, position + 64) of a bitmap; what lies beyond `end` reads as zero.
inline uint64_t bits_at(const Index& index, int64_t position, int64_t end) {
  const int64_t byte = position / 8, left = index.size - byte;
  const int shift = static_cast<int>(position % 8);
  uint64_t word = 0;
  if (left > 8) {
    std::memcpy(&word, index.bytes + byte, 8);
    word >>= shift;
    if (shift) word |= static_cast<uint64_t>(index.bytes[byte + 8]) << (64 - shift);
  } else {
    for (int64_t i = 0; i < left; ++i) word |= static_cast<uint64_t>(index.bytes[byte + i]) << (8 * i);
    word >>= shift;
  }
  return end - position < 64 ? word & ((uint64_t{1} << (end - position)) - 1) : word;
}

// Passes the nonzeros before `end` and calls visit(position, rank) for each.
template <class Visit>
inline void walk(const Index& index, Cursor& cursor, int64_t end, Visit visit) {
  Cursor at = cursor;  // in registers
  if (index.is_bitmap()) {
    for (; at.position < end; at.position += 64) {
      for (uint64_t word = bits_at(index, at.position, end); word; word &= word - 1)
        visit(at.position + __builtin_ctzll(word), at.rank++);
    }
    cursor = {end, 0, at.rank};
    return;
  }
  while (at.byte < index.size) {
    const int64_t gap = index.bytes[at.byte];
    if (gap == ESCAPE) {
      at.position += ESCAPE;
    } else if (at.position + gap < end) {
      visit(at.position + gap, at.rank++);
      at.position += gap + 1;
    } else {
      break;
    }
    ++at.byte;
  }
  cursor = at;
}

// Passes the nonzeros before `end` without looking at them.
inline void skip(const Index& index, Cursor& cursor, int64_t end) {
  if (!index.is_bitmap()) return walk(index, cursor, end, [](int64_t, int64_t) {});
  for (; cursor.position < end; cursor.position += 64)
    cursor.rank += __builtin_popcountll(bits_at(index, cursor.position, end));
  cursor.position = end;
}

// Passes the nonzeros before `end` and writes their positions, counted from `origin`; returns how many.
inline int64_t gather(const Index& index, Cursor& cursor, int64_t end, int64_t origin, int32_t* out) {
  const int32_t* begin = out;
  walk(index, cursor, end, [&](int64_t position, int64_t) { *out++ = static_cast<int32_t>(position - origin); });
  return out - begin;
}
