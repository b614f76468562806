// Rows of a sparse table: gathered for ids, and the gradient of its nonzeros from that of the gathered rows.
// Tokens come in the order of their ids, so that the index is gone through once.
#include <algorithm>

#include "core.h"
#include "sparse_index.h"
#include "sparse_work.h"

namespace {

struct Table {
  Index index;
  int64_t rows, width;
};

// order = the tokens by their ids, and by their own number where ids are the same.
void sort_tokens(const int64_t* ids, int64_t tokens, int32_t* order) {
  for (int64_t t = 0; t < tokens; ++t) order[t] = static_cast<int32_t>(t);
  std::sort(order, order + tokens, [=](int32_t a, int32_t b) { return ids[a] < ids[b] || (ids[a] == ids[b] && a < b); });
}

// out[token] = row ids[token], zeros included; each thread has some of the tokens.
template <class T>
void gather_rows(const Table& table, const int64_t* ids, Range tokens, const int32_t* order, const T* values,
                 int32_t* found, T* out) {
  Cursor cursor;
  const T* last = nullptr;  // the row that was made before
  for (int64_t i = tokens.begin; i < tokens.end; ++i) {
    T* row = out + order[i] * table.width;
    const int64_t start = ids[order[i]] * table.width;
    if (last && ids[order[i]] == ids[order[i - 1]]) {
      std::copy(last, last + table.width, row);
    } else {
      skip(table.index, cursor, start);
      const T* value = values + cursor.rank;
      const int64_t count = gather(table.index, cursor, start + table.width, start, found);
      std::fill(row, row + table.width, T{});
      for (int64_t k = 0; k < count; ++k) row[found[k]] = value[k];
    }
    last = row;
  }
}

// gradient[rank] (+)= the sum over the tokens of its row, for the rows [rows.begin, rows.end).
template <class T, class G>
void add_rows(const Table& table, const int64_t* ids, int64_t tokens, const int32_t* order, Range rows, const T* dy,
              bool accumulate, int32_t* found, float* sums, G* gradient) {
  const auto before = [&](int32_t token, int64_t row) { return ids[token] < row; };
  const int32_t *token = std::lower_bound(order, order + tokens, rows.begin, before), *end = order + tokens;
  Cursor cursor;
  skip(table.index, cursor, rows.begin * table.width);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    G* out = gradient + cursor.rank;
    const int64_t start = row * table.width, count = gather(table.index, cursor, start + table.width, start, found);
    std::fill(sums, sums + count, 0.f);
    for (; token < end && ids[*token] == row; ++token) {
      const T* from = dy + *token * table.width;
      for (int64_t k = 0; k < count; ++k) sums[k] += widen(from[found[k]]);
    }
    for (int64_t k = 0; k < count; ++k) put(out + k, sums[k], accumulate);
  }
}

// Of each thread: where a row's nonzeros are, and their sums.
int64_t thread_bytes(int64_t width) { return ((width + OVERRUN) * 4 + width * 4 + 63) / 64 * 64; }
int64_t order_bytes(int64_t tokens) { return (tokens * 4 + 63) / 64 * 64; }

int64_t scratch_bytes(int64_t tokens, int64_t width, int threads) {
  return order_bytes(tokens) + threads * thread_bytes(width);
}

void gather_embedding(Address ids, int64_t tokens, Address values, int code, Address index, int64_t index_size,
                      int64_t rows, int64_t width, Address out, Address scratch, int threads) {
  const Table table{{at<uint8_t>(index), index_size, rows * width}, rows, width};
  int32_t* order = at<int32_t>(scratch);
  sort_tokens(at<int64_t>(ids), tokens, order);
  on_threads(threads, [&](int64_t thread) {
    int32_t* found = at<int32_t>(scratch + order_bytes(tokens) + thread * thread_bytes(width));
    with_storage(code, [&](auto tag) {
      using T = decltype(tag);
      gather_rows(table, at<int64_t>(ids), part(tokens, threads, thread), order, at<T>(values), found, at<T>(out));
    });
  });
}

void embedding_gradient(Address ids, int64_t tokens, Address dy, int code, Address index, int64_t index_size,
                        int64_t rows, int64_t width, Address gradient, int gradient_code, bool accumulate,
                        Address scratch, int threads) {
  const Table table{{at<uint8_t>(index), index_size, rows * width}, rows, width};
  int32_t* order = at<int32_t>(scratch);
  sort_tokens(at<int64_t>(ids), tokens, order);
  on_threads(threads, [&](int64_t thread) {
    int32_t* found = at<int32_t>(scratch + order_bytes(tokens) + thread * thread_bytes(width));
    float* sums = reinterpret_cast<float*>(found + width + OVERRUN);
    with_storage(code, [&](auto tag) {
      with_storage(gradient_code, [&](auto gradient_tag) {
        add_rows(table, at<int64_t>(ids), tokens, order, part(rows, threads, thread), at<decltype(tag)>(dy), accumulate,
                 found, sums, at<decltype(gradient_tag)>(gradient));
      });
    });
  });
}

}  // namespace

void bind_sparse_embedding(nb::module_& m) {
  m.def("sparse_embedding_scratch", &scratch_bytes);
  m.def("sparse_gather_rows", &gather_embedding, Release());
  m.def("sparse_embedding_gradient", &embedding_gradient, Release());
}
