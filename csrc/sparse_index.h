// Where the nonzeros of a weight are: the positions in a flat, row-major weight, in rising order, as the smaller of
//   a bitmap: bit i of byte j stands for position 8 j + i;
//   gaps: a byte for each nonzero, the zeros skipped before it (0-254); 255 skips 255 zeros and is no nonzero.
// Gaps are used only where they are strictly shorter, so that the length alone tells which of the two it is.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

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

// Of every byte the places of its set bits, in rising order.
struct SetBits {
  uint8_t of[256][8] = {};
  constexpr SetBits() {
    for (int byte = 0; byte < 256; ++byte)
      for (int bit = 0, n = 0; bit < 8; ++bit)
        if (byte >> bit & 1) of[byte][n++] = static_cast<uint8_t>(bit);
  }
};
constexpr SetBits SET_BITS;
constexpr int64_t OVERRUN = 8;  // places behind the last position that `gather` and `tally` may touch

// A bitmap a byte at a time: out[i] = first + the place of set bit i, and seven places more are written.
inline void put_places(int32_t* out, int byte, int32_t first) {
#if defined(__AVX2__)
  const __m128i places = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(SET_BITS.of[byte]));
  const __m256i sum = _mm256_add_epi32(_mm256_cvtepu8_epi32(places), _mm256_set1_epi32(first));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), sum);
#else
  for (int i = 0; i < 8; ++i) out[i] = first + SET_BITS.of[byte][i];
#endif
}

// The places of a word's set bits; returns where the next are to be written.
inline int32_t* put_word(int32_t* out, uint64_t word, int32_t first) {
  for (int byte = 0; byte < 8; ++byte, word >>= 8, first += 8) {
    put_places(out, word & 255, first);
    out += __builtin_popcountll(word & 255);
  }
  return out;
}

// Bit j of word i becomes bit i of word j.
inline void transpose_bits(uint64_t (&words)[64]) {
  uint64_t mask = UINT32_MAX;
  for (int half = 32; half; half /= 2, mask ^= mask << half)
    for (int block = 0; block < 64; block += 2 * half)
      for (int i = block; i < block + half; ++i) {
        const uint64_t changed = ((words[i] >> half) ^ words[i + half]) & mask;
        words[i] ^= changed << half;
        words[i + half] ^= changed;
      }
}

// counters[i] += bit i.
inline void add_bits(int32_t* counters, int byte) {
#if defined(__AVX2__)
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(byte), each), each);  // -1
  __m256i* at = reinterpret_cast<__m256i*>(counters);
  _mm256_storeu_si256(at, _mm256_sub_epi32(_mm256_loadu_si256(at), set));
#else
  for (int i = 0; i < 8; ++i) counters[i] += byte >> i & 1;
#endif
}

// Passes the nonzeros before `end` and writes their positions, counted from `origin`; returns how many.
inline int64_t gather(const Index& index, Cursor& cursor, int64_t end, int64_t origin, int32_t* out) {
  const int32_t* begin = out;
  if (!index.is_bitmap()) {
    walk(index, cursor, end, [&](int64_t position, int64_t) { *out++ = static_cast<int32_t>(position - origin); });
    return out - begin;
  }
  for (int64_t position = cursor.position; position < end; position += 64) {  // no branch for each nonzero
    uint64_t word = bits_at(index, position, end);
    int32_t first = static_cast<int32_t>(position - origin);
    for (int64_t left = std::min<int64_t>(64, end - position); left > 0; left -= 8, word >>= 8, first += 8) {
      put_places(out, word & 255, first);
      out += __builtin_popcountll(word & 255);
    }
  }
  cursor = {end, 0, cursor.rank + (out - begin)};
  return out - begin;
}

// Counts the nonzeros from the cursor to `end`, each by its own counter: that of `origin` is the first.
inline void tally(const Index& index, Cursor cursor, int64_t end, int64_t origin, int32_t* counters) {
  if (!index.is_bitmap()) return walk(index, cursor, end, [&](int64_t position, int64_t) { ++counters[position - origin]; });
  for (int64_t position = cursor.position; position < end; position += 64) {
    uint64_t word = bits_at(index, position, end);
    int32_t* first = counters + (position - origin);
    for (int64_t left = std::min<int64_t>(64, end - position); left > 0; left -= 8, word >>= 8, first += 8)
      add_bits(first, word & 255);
  }
}
