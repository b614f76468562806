// Making, reading and checking the index of a sparse weight (sparse_index.h).
#include "sparse_index.h"

#include "core.h"

static void set_bits(Address positions, int64_t count, Address bits) {
  const int32_t* p = at<int32_t>(positions);
  uint8_t* out = at<uint8_t>(bits);
  for (int64_t i = 0; i < count; ++i) out[p[i] / 8] |= static_cast<uint8_t>(1 << p[i] % 8);
}

template <class Emit>
static void each_gap(const Index& bitmap, Emit emit) {
  int64_t next = 0;
  Cursor cursor;
  walk(bitmap, cursor, bitmap.numel, [&](int64_t position, int64_t) {
    for (; position - next >= ESCAPE; next += ESCAPE) emit(ESCAPE);
    emit(position - next);
    next = position + 1;
  });
}

static int64_t count_gap_bytes(Address bits, int64_t numel) {
  int64_t size = 0;
  each_gap({at<uint8_t>(bits), (numel + 7) / 8, numel}, [&](int64_t) { ++size; });
  return size;
}

static void gaps_from_bitmap(Address bits, int64_t numel, Address gaps) {
  uint8_t* out = at<uint8_t>(gaps);
  each_gap({at<uint8_t>(bits), (numel + 7) / 8, numel}, [&](int64_t gap) { *out++ = static_cast<uint8_t>(gap); });
}

static void bitmap_from_index(Address index, int64_t size, int64_t numel, Address bits) {
  uint8_t* out = at<uint8_t>(bits);
  std::memset(out, 0, (numel + 7) / 8);
  Cursor cursor;
  walk({at<uint8_t>(index), size, numel}, cursor, numel,
       [&](int64_t position, int64_t) { out[position / 8] |= static_cast<uint8_t>(1 << position % 8); });
}

static int64_t count_nonzeros(Address index, int64_t size, int64_t numel, int64_t start, int64_t stop) {
  const Index where{at<uint8_t>(index), size, numel};
  Cursor cursor;
  skip(where, cursor, start);
  const int64_t before = cursor.rank;
  skip(where, cursor, stop);
  return cursor.rank - before;
}

static void decode_index(Address index, int64_t size, int64_t numel, int64_t start, int64_t stop, Address positions) {
  const Index where{at<uint8_t>(index), size, numel};
  int32_t* out = at<int32_t>(positions);
  Cursor cursor;
  skip(where, cursor, start);
  walk(where, cursor, stop, [&](int64_t position, int64_t) { *out++ = static_cast<int32_t>(position); });
}

// The number of nonzeros of an index that is whole, or -1: a bit beyond the last position, a gap that leads beyond it,
// or an escape that nothing follows.
static int64_t check_index(Address index, int64_t size, int64_t numel) {
  const Index where{at<uint8_t>(index), size, numel};
  if (size > (numel + 7) / 8) return -1;
  Cursor cursor;
  if (where.is_bitmap()) {
    if (numel % 8 && where.bytes[size - 1] >> numel % 8) return -1;
    skip(where, cursor, numel);
    return cursor.rank;
  }
  walk(where, cursor, numel, [](int64_t, int64_t) {});
  const bool open = size > 0 && where.bytes[size - 1] == ESCAPE;
  return cursor.byte < size || open ? -1 : cursor.rank;
}

void bind_sparse_index(nb::module_& m) {
  m.def("set_bits", &set_bits, Release());
  m.def("count_gap_bytes", &count_gap_bytes, Release());
  m.def("gaps_from_bitmap", &gaps_from_bitmap, Release());
  m.def("bitmap_from_index", &bitmap_from_index, Release());
  m.def("count_nonzeros", &count_nonzeros, Release());
  m.def("decode_index", &decode_index, Release());
  m.def("check_index", &check_index, Release());
}
