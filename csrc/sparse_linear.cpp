// Sparse linear layers: the product, the gradient of its input, and the gradient of the weight at its nonzeros only.
// Tokens are here what pixels are to a convolution: up to eight vectors of them are turned into FP32 scratch, channel after channel,
// so that a nonzero costs one multiply-add for a vector of tokens. Every thread has lines of its own, a block of which is
// decoded before the tokens go through it, tile after tile.
#include "core.h"
#include "sparse_geometry.h"
#include "sparse_tile.h"
#include "sparse_work.h"

namespace {

constexpr int64_t BLOCK = 16384;  // entries decoded at a time: each time the tokens are turned again, if they are many
constexpr int64_t ENTRIES = 16;   // of a line in a chunk of the channels: fewer do not pay for a loop of their own

struct Shape {
  int64_t tokens, channels, lines;  // channels are read, lines are written
  int64_t sparsity;                 // a nonzero in so many places
  int64_t tiles() const { return divide_up(tokens, TILE_VECTORS * LANES); }
  int64_t vectors() const { return divide_up(divide_up(tokens, std::max<int64_t>(1, tiles())), LANES); }
  int64_t width() const { return std::max<int64_t>(1, vectors()) * LANES; }  // tokens of a tile
  // Channels whose tokens fit the nearest cache, or more where nonzeros are few: whole words of the index.
  int64_t chunk_channels() const {
    const int64_t wanted = std::max(CACHE_BYTES / (width() * 4), ENTRIES * sparsity);
    return round_up(std::max<int64_t>(1, std::min(channels, wanted)), 64);
  }
  int64_t chunks() const { return divide_up(std::max<int64_t>(1, channels), chunk_channels()); }
};

// What Python passes: rows and width of the weight, and how many nonzeros it has.
struct Weight {
  int64_t rows, width, count;
  Nonzeros nonzeros(const Shape& shape, bool transposed, bool ranked, Index index, const void* values, int code) const {
    return {index, ranked, values, code, count, rows, width, 1, transposed, shape.chunks(), shape.chunk_channels(), 1};
  }
};

// What one thread works with: the tile's channels, and one more that is zero; its lines; the sums of entries.
struct Workspace {
  float* source;
  Blocks blocks;
  float *lines, *sums;
  Workspace(const Shape& shape, const Nonzeros& nonzeros, int threads, Arena& arena)
      : source(arena.take<float>((shape.channels + 1) * shape.width())),
        blocks(nonzeros, 1, divide_up(shape.lines, threads), BLOCK, arena) {
    lines = arena.take<float>(blocks.height() * shape.width());
    sums = arena.take<float>(nonzeros.ranked ? blocks.size() : 0);
    if (!arena.base) return;
    std::fill(source, source + (shape.channels + 1) * shape.width(), 0.f);
    blocks.group_of[0] = blocks.offset_of[0] = 0;
  }
};

int64_t workspace_bytes(const Shape& shape, const Nonzeros& nonzeros, int threads) {
  Arena arena{nullptr};
  return Workspace(shape, nonzeros, threads, arena).blocks.countable() ? arena.used : TOO_LARGE;
}

// body(constant): the number of vectors in a tile, known to the compiler.
template <int NV>
struct Form { static constexpr int vectors = NV; };
template <class Body>
void with_form(const Shape& shape, Body body) {
  switch (shape.vectors()) {
    case 1: return body(Form<1>{});
    case 2: return body(Form<2>{});
    case 3: return body(Form<3>{});
    case 4: return body(Form<4>{});
    case 5: return body(Form<5>{});
    case 6: return body(Form<6>{});
    case 7: return body(Form<7>{});
    case 8: return body(Form<8>{});
  }
}

// For every block of a thread's lines: begin(), body(constant, storage tag, tokens) for every tile of tokens, end().
template <class Begin, class Body, class End>
void each_tile(const Shape& shape, Workspace& space, Range lines, int code, Address x, Begin begin, Body body,
               End end) {
  for (space.blocks.begin(lines.begin, lines.end); space.blocks.next(); end()) {
    begin();
    with_storage(code, [&](auto tag) {
      with_form(shape, [&](auto form) {
        for (int64_t t = 0; t < shape.tokens; t += shape.width()) {
          const Range tokens{t, std::min(shape.tokens, t + shape.width())};
          if (shape.tiles() > 1 || space.blocks.first == lines.begin)  // the tokens of one tile stay
            transpose(at<decltype(tag)>(x) + t * shape.channels, shape.channels, tokens.end - t, shape.channels,
                      space.source, shape.width());
          body(form, tag, tokens);
        }
      });
    });
  }
}

// Every line of the block, for one tile of tokens; the bias is added before anything is rounded.
template <int NV>
void multiply_lines(const Workspace& space, int64_t chunks, const float* bias) {
  const Blocks& blocks = space.blocks;
  const char* base = reinterpret_cast<const char*>(space.source);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int32_t* starts = blocks.starts + chunk;
    float* out = space.lines;
    for (int64_t line = blocks.first; line < blocks.last; ++line, starts += chunks, out += LANES * NV) {
      Vector sum[NV] = {};
      int64_t entry = starts[0];
      accumulate<LANES * NV * 4>(sum, blocks, entry, starts[1], base);
      if (chunk) add_tile(sum, out);  // chunks are summed apart: the rounding of millions of terms would add up
      if (bias && chunk + 1 == chunks) add_to_tile(sum, bias[line]);
      keep_tile(sum, out);
    }
  }
}

// For every entry of the block, the product of its line's gradient with its channel, summed over one tile of tokens.
template <int NV>
void dot_lines(const Workspace& space, int64_t chunks) {
  const Blocks& blocks = space.blocks;
  const char* base = reinterpret_cast<const char*>(space.source);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int32_t* starts = blocks.starts + chunk;
    const float* gradient = space.lines;
    for (int64_t line = blocks.first; line < blocks.last; ++line, starts += chunks, gradient += LANES * NV) {
      Vector whole[NV];
      load_tile(whole, gradient);
      dot<LANES * NV * 4>(whole, blocks.offsets, starts[0], starts[1], base, space.sums);
    }
  }
}

Shape shape_of(const Weight& weight, int64_t tokens, bool transposed) {
  return {tokens, transposed ? weight.rows : weight.width, transposed ? weight.width : weight.rows,
          weight.rows * weight.width / std::max<int64_t>(1, weight.count)};
}

int64_t multiply_scratch(int64_t tokens, int64_t rows, int64_t width, int64_t count, bool transposed, bool ranked,
                         int threads) {
  const Weight weight{rows, width, count};
  const Shape shape = shape_of(weight, tokens, transposed);
  const int64_t bytes = workspace_bytes(shape, weight.nonzeros(shape, transposed, ranked, {}, nullptr, 0), threads);
  return bytes == TOO_LARGE ? TOO_LARGE : threads * bytes;
}

// y = x W' + bias (one a line, or none), or (transposed) the gradient of x from that of y.
void multiply_tokens(int64_t tokens, int64_t rows, int64_t width, bool transposed, Address x, int code, Address values,
              int values_code, Address index, int64_t index_size, int64_t count, Address bias, Address y,
              Address scratch, int threads) {
  const Weight weight{rows, width, count};
  const Shape shape = shape_of(weight, tokens, transposed);
  const Index where{at<uint8_t>(index), index_size, rows * width};
  const Nonzeros nonzeros = weight.nonzeros(shape, transposed, false, where, at<void>(values), values_code);
  const int64_t bytes = workspace_bytes(shape, nonzeros, threads);
  on_threads(threads, [&](int64_t thread) {
    Arena arena{at<uint8_t>(scratch) + thread * bytes};
    Workspace space(shape, nonzeros, threads, arena);
    const auto body = [&](auto form, auto tag, Range tile) {
      multiply_lines<form.vectors>(space, shape.chunks(), at<float>(bias));
      const Blocks& blocks = space.blocks;
      transpose(space.lines, shape.width(), blocks.last - blocks.first, tile.end - tile.begin,
                at<decltype(tag)>(y) + tile.begin * shape.lines + blocks.first, shape.lines);
    };
    each_tile(shape, space, part(shape.lines, threads, thread), code, x, [] {}, body, [] {});
  });
}

// gradient[rank] (+)= sum over tokens.
void weight_gradient(int64_t tokens, int64_t rows, int64_t width, Address x, Address dy, int code, Address index,
                     int64_t index_size, int64_t count, Address gradient, int gradient_code, bool accumulate,
                     Address scratch, int threads) {
  const Weight weight{rows, width, count};
  const Shape shape = shape_of(weight, tokens, false);
  const Index where{at<uint8_t>(index), index_size, rows * width};
  const Nonzeros nonzeros = weight.nonzeros(shape, false, true, where, nullptr, 0);
  const int64_t bytes = workspace_bytes(shape, nonzeros, threads);
  on_threads(threads, [&](int64_t thread) {
    Arena arena{at<uint8_t>(scratch) + thread * bytes};
    Workspace space(shape, nonzeros, threads, arena);
    const Blocks& blocks = space.blocks;
    const auto begin = [&] { std::fill(space.sums, space.sums + blocks.entries(), 0.f); };
    const auto body = [&](auto form, auto tag, Range tile) {
      const int64_t lines = blocks.last - blocks.first;
      if (tile.end - tile.begin < shape.width()) std::fill(space.lines, space.lines + lines * shape.width(), 0.f);
      transpose(at<decltype(tag)>(dy) + tile.begin * rows + blocks.first, rows, tile.end - tile.begin, lines,
                space.lines, shape.width());
      dot_lines<form.vectors>(space, shape.chunks());
    };
    const auto end = [&] {
      with_storage(gradient_code, [&](auto tag) {
        const auto out = at<decltype(tag)>(gradient);
        for (int64_t bin = 0; bin < (blocks.last - blocks.first) * shape.chunks(); ++bin) {
          const int64_t begin = blocks.starts[bin], rank = blocks.ranks[begin];
          int64_t end = blocks.starts[bin + 1];
          while (end > begin && blocks.ranks[end - 1] < 0) --end;
          for (int64_t e = begin; e < end; ++e) put(out + rank + e - begin, space.sums[e], accumulate);
        }
      });
    };
    each_tile(shape, space, part(shape.lines, threads, thread), code, x, begin, body, end);
  });
}

}  // namespace

void bind_sparse_linear(nb::module_& m) {
  m.def("sparse_multiply_scratch", &multiply_scratch);
  m.def("sparse_multiply", &multiply_tokens, Release());
  m.def("sparse_linear_weight_gradient", &weight_gradient, Release());
}
