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

// A weight's nonzeros, and how a kernel reads them. A line is an output of the kernel: a row of the weight, or (if
// transposed) the columns of one input channel. The channels that a line reads are cut into chunks whose source fits
// the nearest cache, and the entries of a chunk are sorted into groups.
struct Nonzeros {
  Index index;
  bool ranked;  // entries hold ranks, not weights
  const void* values;
  int code;  // storage of the values, as in with_storage
  int64_t count, rows, row_length, kernel;
  bool transposed;
  int64_t chunks, chunk_channels, groups;
  int64_t lines() const { return transposed ? row_length / kernel : rows; }
  int64_t channels() const { return transposed ? rows : row_length / kernel; }
  int64_t bins() const { return chunks * groups; }  // of a line
  bool plain() const { return kernel == 1 && groups == 1; }  // as in linear layers: nothing is to be sorted
};

constexpr int UNROLL = 4;
inline int64_t round_to_four(int64_t count) { return (count + UNROLL - 1) / UNROLL * UNROLL; }

// Entries [starts[b], starts[b + 1]) are those of bin b = ((line - first) * chunks + chunk) * groups + group. Every bin
// is filled up to a multiple of UNROLL by entries that read the channel after the last, which is zero, and have weight 0
// or rank -1.
class Blocks {
 public:
  int32_t* group_of;   // of each kernel position its group, below MAX_GROUPS if not transposed,
  int32_t* offset_of;  // and where it reads within a channel
  int32_t* offsets;    // of each entry, in bytes from the tile's first float
  float* weights;      // of each entry its weight,
  int32_t* ranks;      // or which of the nonzeros it is
  int32_t* starts;
  int64_t first = 0, last = 0;  // lines of the present block

  Blocks(const Nonzeros& nonzeros, int64_t channel_bytes, int64_t lines, int64_t budget, Arena& arena)
      : from(nonzeros), channel_bytes(channel_bytes) {
    const int64_t slack = from.bins() * (UNROLL - 1), longest = from.channels() * from.kernel + slack;
    capacity = std::min({std::max(budget, longest), from.count + lines * slack, lines * longest});
    if (from.plain()) capacity += OVERRUN;
    const int64_t average = from.count / std::max<int64_t>(1, from.lines()) + slack / 2 + 1;
    most_lines = std::max<int64_t>(1, std::min(lines, capacity / average));
    if (turnable()) most_lines = std::min<int64_t>(most_lines, 64);
    group_of = arena.take<int32_t>(from.kernel);
    offset_of = arena.take<int32_t>(from.kernel);
    offsets = arena.take<int32_t>(capacity + (plain_rows() ? chunk_length() + OVERRUN : 0));
    weights = arena.take<float>(capacity);
    ranks = reinterpret_cast<int32_t*>(weights);
    starts = arena.take<int32_t>(most_lines * from.bins() + 1);
    if (plain_rows()) return;
    found = arena.take<int32_t>(from.row_length + OVERRUN);
    columns = arena.take<Column>(from.row_length);
    if (from.transposed) {
      cursors = arena.take<Cursor>(from.rows);
      places = arena.take<int32_t>(most_lines * from.chunks * from.kernel + OVERRUN);
      bits = arena.take<uint64_t>(turnable() ? (from.rows + 63) / 64 * 64 : 0);
      next_of = arena.take<int64_t>(turnable() ? from.rows : 0);
    } else {
      masks = arena.take<uint64_t>(mask_words());
    }
  }
  int64_t size() const { return capacity; }
  // Offsets are 32 bits, as are numbers of entries; the entries of one chunk are counted in a field.
  bool countable() const {
    return (from.channels() + 1) * channel_bytes <= UINT32_MAX && capacity <= INT32_MAX && from.count <= INT32_MAX &&
           (from.transposed || chunk_length() + from.groups * UNROLL <= MASK);
  }
  int64_t height() const { return most_lines; }  // no block has more
  int64_t entries() const { return starts[(last - first) * from.bins()]; }

  // Before the first block of lines [line, end); group_of and offset_of have been filled.
  void begin(int64_t line, int64_t end) {
    first = last = line;
    stop = end;
    cursor = Cursor{};
    if (plain_rows()) return skip(from.index, cursor, line * from.row_length);
    for (int64_t p = 0; p < from.row_length; ++p) {
      const int64_t channel = from.transposed ? 0 : p / from.kernel * channel_bytes;
      columns[p] = {static_cast<int32_t>(offset_of[p % from.kernel] + channel), FIELD * group_of[p % from.kernel]};
    }
    if (from.transposed) {
      for (int64_t row = 0; row < from.rows; ++row) {
        skip(from.index, cursor, row * from.row_length + line * from.kernel);
        cursors[row] = cursor;
      }
    } else {
      std::fill(masks, masks + mask_words(), 0);
      for (int64_t p = 0; p < chunk_length(); ++p)
        masks[p / 64 * from.groups + group_of[p % from.kernel]] |= uint64_t{1} << (p % 64);
      skip(from.index, cursor, line * from.row_length);
    }
  }

  // Decodes as many further lines as fit; false when none are left.
  bool next() {
    first = last;
    if (first >= stop) return false;
    last = std::min(stop, first + most_lines);
    if (!from.ranked) {
      with_storage(from.code, [&](auto tag) {
        const auto* values = static_cast<const decltype(tag)*>(from.values);
        fill([=](int64_t rank) { return widen(values[rank]); }, weights);
      });
    } else {
      fill([](int64_t rank) { return static_cast<int32_t>(rank); }, ranks);
    }
    return true;
  }

 private:
  // Up to three groups are counted in the fields of one register: counters in memory would wait for each other.
  static constexpr int FIELD = 21, MAX_GROUPS = 3;
  static constexpr int64_t MASK = (int64_t{1} << FIELD) - 1;

  Nonzeros from;
  int64_t channel_bytes, capacity, most_lines, stop = 0, stride = 0;
  struct Column { int32_t offset, field; };
  Column* columns = nullptr;  // of each position of a row
  uint64_t* masks = nullptr;  // of each word of a chunk and each group: which of its positions are the group's
  int32_t *found = nullptr, *places = nullptr;
  uint64_t* bits = nullptr;    // of 64 rows and each line of the block: which of the rows have a nonzero there
  int64_t* next_of = nullptr;  // of each row: its next nonzero
  Cursor cursor;
  Cursor* cursors = nullptr;

  int64_t chunk_length() const { return from.chunk_channels * from.kernel; }
  bool plain_rows() const { return from.plain() && !from.transposed; }
  bool turnable() const { return from.plain() && from.transposed && from.chunk_channels % 64 == 0; }
  int64_t mask_words() const { return (chunk_length() / 64 + 1) * from.groups; }

  template <class Payload, class Out>
  void fill(Payload payload, Out* out) {
    if (turnable() && from.index.is_bitmap()) fill_turned(payload, out);
    else if (from.transposed) fill_from_columns(payload, out);
    else if (from.plain()) fill_plain(payload, out);
    else fill_from_rows(payload, out);
  }

  // Entries [begin, end) that add nothing: what a bin's own do not overwrite fills it up.
  template <class Out>
  void clear(int64_t begin, int64_t end, Out* out) {
    std::fill(offsets + begin, offsets + end, static_cast<int32_t>(from.channels() * channel_bytes));
    std::fill(out + begin, out + end, static_cast<Out>(from.ranked ? -1 : 0));
  }

  template <class Payload, class Out>
  void fill_from_rows(Payload payload, Out* out) {
    const int64_t slack = from.groups * (UNROLL - 1);
    int64_t start = 0, bin = 0;
    for (int64_t line = first; line < last; ++line) {
      const Cursor before = cursor;
      const int64_t line_start = start, origin = line * from.row_length;
      for (int64_t chunk = 0; chunk < from.chunks; ++chunk, bin += from.groups) {
        const int64_t rank = cursor.rank, position = cursor.position;
        const int64_t end = std::min(from.row_length, (chunk + 1) * chunk_length());
        const int64_t n = gather(from.index, cursor, origin + end, origin, found);
        if (start + n + slack > capacity) {  // this line begins the next block
          cursor = before;
          last = line;
          starts[(last - first) * from.bins()] = static_cast<int32_t>(line_start);
          return;
        }
        start = fill_piece(bin, start, n, count_groups(position, origin + end, n), payload, rank, out);
      }
    }
    starts[bin] = static_cast<int32_t>(start);
  }

  // Plain rows: the nonzeros of a chunk stay as they are found.
  template <class Payload, class Out>
  void fill_plain(Payload payload, Out* out) {
    int64_t start = 0, bin = 0;
    for (int64_t line = first; line < last; ++line) {
      const Cursor before = cursor;
      const int64_t line_start = start, origin = line * from.row_length;
      for (int64_t chunk = 0; chunk < from.chunks; ++chunk, ++bin) {
        const int64_t rank = cursor.rank, end = std::min(from.row_length, (chunk + 1) * chunk_length());
        const int64_t n = gather(from.index, cursor, origin + end, origin, offsets + start);
        if (start + n + UNROLL > capacity) {  // this line begins the next block
          cursor = before;
          last = line;
          starts[(last - first) * from.bins()] = static_cast<int32_t>(line_start);
          return;
        }
        starts[bin] = static_cast<int32_t>(start);
        start = put_bin(start, n, [=](int64_t i) { return payload(rank + i); }, out);
      }
    }
    starts[bin] = static_cast<int32_t>(start);
  }

  // The `n` entries from `start` on, whose channels are there: bytes in place of channels, what each holds, and what fills
  // the bin up; returns where the next bin starts.
  template <class Payload, class Out>
  int64_t put_bin(int64_t start, int64_t n, Payload payload, Out* out) {
    Out* const mine = out + start;
    for (int64_t i = 0; i < n; ++i) mine[i] = payload(i);
    if (channel_bytes != 1)
      for (int64_t i = 0; i < n; ++i) offsets[start + i] *= static_cast<int32_t>(channel_bytes);
    const int64_t end = round_to_four(start + n);
    clear(start + n, end, out);
    return end;
  }

  // Plain columns: the bits of 64 rows at a time are turned, and the columns take the values of a row in turn.
  template <class Payload, class Out>
  void fill_turned(Payload payload, Out* out) {
    for (int64_t row = 0; row < from.rows; row += 64) read_rows(row, std::min(from.rows, row + 64));
    int64_t start = 0, bin = 0, line = first;
    const int64_t words = (from.rows + 63) / 64, chunk_words = from.chunk_channels / 64;
    for (; line < last; ++line) {
      int64_t count = from.chunks * (UNROLL - 1);
      for (int64_t word = 0; word < words; ++word) count += __builtin_popcountll(bits[word * 64 + line - first]);
      if (start + count + OVERRUN > capacity && line > first) break;  // this line begins the next block
      for (int64_t chunk = 0; chunk < from.chunks; ++chunk, ++bin) {
        int32_t* const channels = offsets + start;
        int32_t* end = channels;
        for (int64_t word = chunk * chunk_words; word < std::min(words, (chunk + 1) * chunk_words); ++word)
          end = put_word(end, bits[word * 64 + line - first], static_cast<int32_t>(word * 64));
        starts[bin] = static_cast<int32_t>(start);
        start = put_bin(start, end - channels, [=](int64_t i) { return payload(next_of[channels[i]]++); }, out);
      }
    }
    last = line;
    starts[bin] = static_cast<int32_t>(start);
    for (int64_t row = 0; row < from.rows; ++row) cursors[row] = {row * from.row_length + last, 0, next_of[row]};
  }

  // The bits of rows [row, end) in the lines of the block, turned.
  void read_rows(int64_t row, int64_t end) {
    uint64_t words[64] = {};
    for (int64_t i = 0; row + i < end; ++i) {
      const int64_t origin = (row + i) * from.row_length;
      next_of[row + i] = cursors[row + i].rank;
      words[i] = bits_at(from.index, origin + first, origin + last);
    }
    transpose_bits(words);
    std::copy(words, words + 64, bits + row);
  }

  // How many nonzeros of each group a chunk of a line has, in fields; of gaps, the `n` that were found are looked at.
  int64_t count_groups(int64_t position, int64_t end, int64_t n) const {
    int64_t counts = 0;
    if (from.index.is_bitmap()) {
      const uint64_t* mask = masks;
      for (; position < end; position += 64) {
        const uint64_t word = bits_at(from.index, position, end);
        for (int field = 0; field < from.groups * FIELD; field += FIELD)
          counts += int64_t{__builtin_popcountll(word & *mask++)} << field;
      }
    } else {
      for (int64_t i = 0; i < n; ++i) counts += int64_t{1} << columns[found[i]].field;
    }
    return counts;
  }

  // The `n` nonzeros found, into the bins from `bin` on; returns where the next bin starts.
  template <class Payload, class Out>
  int64_t fill_piece(int64_t bin, int64_t start, int64_t n, int64_t counts, Payload payload, int64_t rank, Out* out) {
    const int32_t* const positions = found;  // in registers: a store might change a member
    const Column* const column_of = columns;
    // Slots are counted from the first of this piece, so that a field holds them however long a line is.
    int32_t* const offset = offsets + start;
    Out* const piece = out + start;
    const int64_t origin = start;
    int64_t slots = 0;
    for (int64_t group = 0; group < from.groups; ++group, ++bin) {
      const int64_t count = counts >> (FIELD * group) & MASK;
      slots |= (start - origin) << (FIELD * group);
      starts[bin] = static_cast<int32_t>(start);
      start = round_to_four(start + count);
      if (count) clear(start - UNROLL, start, out);
    }
    for (int64_t i = 0; i < n; ++i) {
      const Column column = column_of[positions[i]];
      const int64_t slot = slots >> column.field & MASK;
      slots += int64_t{1} << column.field;
      offset[slot] = column.offset;
      piece[slot] = payload(rank + i);
    }
    return start;
  }

  // One counter for each kernel position of each line: the next row is the first to meet it again, so that no counter
  // waits for itself.
  void count_columns() {
    stride = (last - first) * from.kernel;
    std::fill(places, places + stride * from.chunks, 0);
    for (int64_t row = 0; row < from.rows; ++row) {
      const int64_t origin = row * from.row_length + first * from.kernel;
      tally(from.index, cursors[row], origin + stride, origin, places + row / from.chunk_channels * stride);
    }
    int64_t start = 0, fitting = 0;
    for (; fitting < last - first; ++fitting) {
      const int64_t end = place_line(fitting, start);
      if (end > capacity) break;
      start = end;
    }
    last = first + fitting;
    starts[fitting * from.bins()] = static_cast<int32_t>(start);
  }

  // Gives the counters of a line their first slots, from `start` on; returns where the next line starts.
  int64_t place_line(int64_t line, int64_t start) {
    for (int64_t bin = line * from.bins(); bin < (line + 1) * from.bins(); ++bin) {
      const int64_t chunk = bin / from.groups % from.chunks, group = bin % from.groups;
      int32_t* counters = places + chunk * stride + line * from.kernel;
      starts[bin] = static_cast<int32_t>(start);
      for (int64_t k = 0; k < from.kernel; ++k) {
        if (group_of[k] != group) continue;
        const int32_t count = counters[k];
        counters[k] = static_cast<int32_t>(start);
        start += count;
      }
      start = round_to_four(start);
    }
    return start;
  }

  template <class Payload, class Out>
  void fill_from_columns(Payload payload, Out* out) {
    count_columns();
    clear(0, entries(), out);
    for (int64_t row = 0; row < from.rows; ++row) {
      const int64_t origin = row * from.row_length + first * from.kernel, rank = cursors[row].rank;
      const int64_t n = gather(from.index, cursors[row], origin + (last - first) * from.kernel, origin, found);
      int32_t* counters = places + row / from.chunk_channels * stride;
      const int32_t shift = static_cast<int32_t>(row * channel_bytes);
      for (int64_t i = 0; i < n; ++i) {
        const int32_t slot = counters[found[i]]++;
        offsets[slot] = columns[found[i]].offset + shift;
        out[slot] = payload(rank + i);
      }
    }
  }
};
