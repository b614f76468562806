// Direct sparse convolution: forward, the gradient of the input, and the gradient of the weight at its nonzeros only.
// One block of lines is decoded, then every sample goes through it: copied to FP32 scratch band by band (batch norm and
// ReLU applied on the way, if asked for), tile after tile, so that a tile's source stays in the nearest cache while all
// lines of the block pass over it.
#include <nanobind/stl/array.h>

#include "core.h"
#include "sparse_map.h"

namespace {

// Entries decoded at a time for `lines` lines. Of few samples there is little to compute for each, and who runs few is
// short of memory, which a large weight takes in any case; who asks for some of the lines, too.
int64_t block_of(const Geometry& g, int64_t lines, int64_t count) {
  const int64_t most = 8192, few = std::clamp<int64_t>(count / 16, 2048, most);
  return (g.samples <= 4 ? few : most) * lines / g.lines;
}
constexpr int64_t AHEAD = 2;     // lines whose map is fetched before its turn

// What one thread works with.
struct Workspace {
  float* source;
  Blocks blocks;
  float* sums;  // forward: of the chunks so far, a tile for each line and class; weight gradient: of each entry
  Workspace(const Geometry& g, const Nonzeros& nonzeros, int64_t lines, Split split, Arena& arena)
      : source(arena.take<float>((g.channels + 1) * g.channel)),
        blocks(nonzeros, g.channel * 4, divide_up(lines, split.lines), block_of(g, lines, nonzeros.count), arena) {
    const int64_t tiles = (g.chunks() > 1 ? blocks.height() : 1) * g.classes() * g.tile_vectors * LANES;
    sums = arena.take<float>(nonzeros.ranked ? blocks.size() : tiles);
    if (!arena.base) return;
    std::fill(source, source + (g.channels + 1) * g.channel, 0.f);
    for (int64_t k = 0; k < nonzeros.kernel; ++k) {
      blocks.group_of[k] = static_cast<int32_t>(g.group(k));
      blocks.offset_of[k] = static_cast<int32_t>(g.offset(k));
    }
  }
};

// The split of some lines of the output, which have about their share of the nonzeros.
Split share_lines(const Geometry& g, int64_t lines, int64_t count, int threads) {
  return share(g, divide_up(count * lines, g.lines), threads, block_of(g, lines, count));
}

int64_t workspace_bytes(const Geometry& g, const Nonzeros& nonzeros, int64_t lines, Split split) {
  Arena arena{nullptr};
  return Workspace(g, nonzeros, lines, split, arena).blocks.countable() ? arena.used : TOO_LARGE;
}

// One tile of one line, whose bins start at `starts`: ROW is the floats of a row, 0 where it is flat.
template <int ROW, int NV>
ALWAYS_INLINE void convolve_tile(Vector (&sum)[NV], const Blocks& blocks, const int32_t* starts, const char* base) {
  int64_t entry = starts[0];
  if constexpr (ROW == 0) {
    accumulate(sum, blocks, entry, starts[1], base);
  } else {
    if (starts[1] > entry) {
      accumulate(sum, blocks, entry, starts[1], base);
      move_right<ROW>(sum, sum);
    }
    accumulate(sum, blocks, entry, starts[2], base);
    if (starts[3] > entry) {
      Vector right[NV] = {};
      accumulate(right, blocks, entry, starts[3], base);
      move_left<ROW>(right, right);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) sum[v] += right[v];
    }
  }
}

// One tile of every line of the block, and of every class; the bias is added before anything is rounded.
template <class T, int ROW, int NV>
void convolve_lines(const Geometry& g, const Workspace& space, const Tile& tile, const float* bias, T* out) {
  const Blocks& blocks = space.blocks;
  const int64_t map = g.h.written_size() * g.w.written_size(), lines = blocks.last - blocks.first;
  const int64_t classes = g.classes(), chunks = g.chunks(), shifts = g.shifts(), bins = chunks * classes * shifts;
  const int64_t stretch = tile.rows.begin * g.row + tile.start;
  const char* base = reinterpret_cast<const char*>(space.source + tile.start);
  const Placement placement = placement_of<ROW, NV>(g, tile);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int32_t* starts = blocks.starts + chunk * classes * shifts;
    T* line_out = out + blocks.first * map;
    for (int64_t line = 0; line < lines; ++line, starts += bins, line_out += map) {
      float* sums = space.sums + (chunks > 1 ? line * classes * LANES * NV : 0);
      if (placement == Placement::STRETCH) prefetch_tile<NV, true>(line_out + AHEAD * map + stretch);
      for (int64_t klass = 0; klass < classes; ++klass, sums += LANES * NV) {
        Vector sum[NV] = {};
        convolve_tile<ROW>(sum, blocks, starts + klass * shifts, base);
        if (chunk > 0) add_tile(sum, sums);
        if (bias && chunk + 1 == chunks) add_to_tile(sum, bias[blocks.first + line]);
        if (chunk + 1 == chunks && placement == Placement::STRETCH) {
          keep_tile(sum, line_out + stretch);
        } else {
          keep_tile(sum, sums);
          if (chunk + 1 == chunks) store_apart<T, ROW, NV>(g, tile, placement, sums, line_out, klass);
        }
      }
    }
  }
}

// For every entry of the block, the product of its line's gradient with what it reads, summed over one tile.
template <class T, int ROW, int NV>
void dot_lines(const Geometry& g, const Workspace& space, const Tile& tile, const T* gradient) {
  const Blocks& blocks = space.blocks;
  const int64_t map = g.h.written_size() * g.w.written_size(), lines = blocks.last - blocks.first;
  const int64_t chunks = g.chunks(), shifts = g.shifts(), stretch = tile.rows.begin * g.row + tile.start;
  const char* base = reinterpret_cast<const char*>(space.source + tile.start);
  const Placement placement = placement_of<ROW, NV>(g, tile);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int32_t* starts = blocks.starts + chunk * shifts;
    const T* line_gradient = gradient + blocks.first * map;
    for (int64_t line = 0; line < lines; ++line, starts += chunks * shifts, line_gradient += map) {
      Vector whole[NV];
      if (placement == Placement::STRETCH) {
        prefetch_tile<NV, false>(line_gradient + AHEAD * map + stretch);
        load_tile(whole, line_gradient + stretch);
      } else {
        gather_pixels(g, tile, line_gradient, whole);
      }
      if constexpr (ROW == 0) {
        dot(whole, blocks.offsets, starts[0], starts[1], base, space.sums);
      } else {  // what the convolution shifts after the sum is shifted the other way before it
        Vector moved[NV];
        move_left<ROW>(moved, whole);
        dot(moved, blocks.offsets, starts[0], starts[1], base, space.sums);
        dot(whole, blocks.offsets, starts[1], starts[2], base, space.sums);
        move_right<ROW>(moved, whole);
        dot(moved, blocks.offsets, starts[2], starts[3], base, space.sums);
      }
    }
  }
}

// body(constants): the floats of a row, 0 where it is flat, and the vectors of a tile, known to the compiler.
template <int ROW, int NV>
struct Form { static constexpr int row = ROW, vectors = NV; };
template <int ROW, class Body>
void with_vectors(const Geometry& g, Body body) {
  switch (g.tile_vectors) {
    case 2: return body(Form<ROW, 2>{});
    case 4: return body(Form<ROW, 4>{});
    case 8: return body(Form<ROW, 8>{});
  }
}
template <class Body>
void with_form(const Geometry& g, Body body) {
  if (!g.whole_rows) return with_vectors<0>(g, body);
  if (g.row < LANES) return with_vectors<LANES / 2>(g, body);
  switch (g.row / LANES) {
    case 1: return body(Form<1 * LANES, 8>{});
    case 2: return body(Form<2 * LANES, 8>{});
    case 3: return body(Form<3 * LANES, 6>{});
    case 4: return body(Form<4 * LANES, 8>{});
    case 5: return body(Form<5 * LANES, 5>{});
    case 6: return body(Form<6 * LANES, 6>{});
    case 7: return body(Form<7 * LANES, 7>{});
    case 8: return body(Form<8 * LANES, 8>{});
  }
}

// body(sample, tile) for the samples' tiles, each with its source in scratch.
template <class T, class Body>
void each_tile(const Geometry& g, Range samples, const T* source, const Prologue& prologue, float* scratch, Body body) {
  const int64_t size = g.channels * g.h.source_size() * g.w.source_size();
  for (int64_t n = samples.begin; n < samples.end; ++n) {
    for (int64_t y = 0; y < g.h.grid(); y += g.band_rows) {
      const Range rows{y, std::min(g.h.grid(), y + g.band_rows)};
      load_band(g, source + n * size, y, prologue, scratch);
      for (int64_t t = 0; t < g.tiles(rows.end - rows.begin); ++t) body(n, Tile{t * g.tile_vectors * LANES, rows});
    }
  }
}

Nonzeros nonzeros_of(const Sizes& sizes, const Geometry& g, bool ranked, Address values, int code, Address index,
                     int64_t size, int64_t count) {
  const int64_t kernel = sizes[KERNEL_H] * sizes[KERNEL_W], length = sizes[IN_CHANNELS] * kernel;
  return {{at<uint8_t>(index), size, sizes[OUT_CHANNELS] * length}, ranked, at<void>(values), code, count,
          sizes[OUT_CHANNELS], length, kernel, g.h.transposed, g.chunks(), g.chunk_channels, g.groups()};
}

int64_t convolve_scratch(const Sizes& sizes, bool transposed, int64_t lines, int64_t count, int threads) {
  const Geometry g(sizes, transposed);
  const Split split = share_lines(g, lines, count, threads);
  const int64_t bytes = workspace_bytes(g, nonzeros_of(sizes, g, false, 0, 0, 0, 0, count), lines, split);
  return bytes == TOO_LARGE ? TOO_LARGE : threads * bytes;
}

// The convolution of x, or (transposed) the gradient of its input from that of its output: `some` lines from `from` on,
// of which alone `out` is made.
void convolve(const Sizes& sizes, bool transposed, int64_t from, int64_t some, Address source, int code,
              Address values, int values_code, Address index, int64_t index_size, int64_t count, Address scale,
              Address shift, Address bias, Address out, Address scratch, int threads) {
  const Geometry g(sizes, transposed);
  const Nonzeros nonzeros = nonzeros_of(sizes, g, false, values, values_code, index, index_size, count);
  const Split split = share_lines(g, some, count, threads);
  const int64_t bytes = workspace_bytes(g, nonzeros, some, split);
  const int64_t map = g.h.written_size() * g.w.written_size();
  on_threads(split.samples * split.lines, [&](int64_t thread) {
    Arena arena{at<uint8_t>(scratch) + thread * bytes};
    const Range samples = part(g.samples, split.samples, thread % split.samples);
    const Range lines = part(some, split.lines, thread / split.samples);
    Workspace space(g, nonzeros, some, split, arena);
    for (space.blocks.begin(from + lines.begin, from + lines.end); space.blocks.next();) {
      with_storage(code, [&](auto tag) {
        using T = decltype(tag);
        with_form(g, [&](auto form) {
          const auto body = [&](int64_t n, const Tile& tile) {
            convolve_lines<T, form.row, form.vectors>(g, space, tile, at<float>(bias),
                                                      at<T>(out) + (n * some - from) * map);
          };
          each_tile(g, samples, at<T>(source), {at<float>(scale), at<float>(shift)}, space.source, body);
        });
      });
    }
  });
}

// Threads that share samples need sums of their own, as large as the weight twice over: few samples are not shared.
Split share_gradient(const Geometry& g, int64_t count, int64_t threads) {
  return g.samples < 4 * threads && g.lines >= threads ? Split{1, threads} : share_lines(g, g.lines, count, threads);
}

int64_t weight_gradient_scratch(const Sizes& sizes, int64_t count, int threads) {
  const Geometry g(sizes, false);
  const Split split = share_gradient(g, count, threads);
  const int64_t partial = split.samples > 1 ? split.samples * round_up(count * 4, 64) : 0;
  const int64_t bytes = workspace_bytes(g, nonzeros_of(sizes, g, true, 0, 0, 0, 0, count), g.lines, split);
  return bytes == TOO_LARGE ? TOO_LARGE : threads * bytes + partial;
}

// gradient[rank] (+)= sum over samples and pixels. Each group of samples has its own FP32 sums, which are added in a
// fixed order: the result depends on the number of threads, but not on their timing.
void weight_gradient(const Sizes& sizes, Address x, Address dy, int code, Address index, int64_t index_size,
                     int64_t count, Address scale, Address shift, Address gradient, int gradient_code, bool accumulate,
                     Address scratch, int threads) {
  const Geometry g(sizes, false);
  const Nonzeros nonzeros = nonzeros_of(sizes, g, true, 0, 0, index, index_size, count);
  const Split split = share_gradient(g, count, threads);
  const int64_t bytes = workspace_bytes(g, nonzeros, g.lines, split), stride = round_up(count, 16);
  const int64_t written = g.lines * g.h.written_size() * g.w.written_size();
  float* partial = at<float>(scratch + threads * bytes);
  on_threads(split.samples * split.lines, [&](int64_t thread) {
    Arena arena{at<uint8_t>(scratch) + thread * bytes};
    const int64_t group = thread % split.samples;
    const Range samples = part(g.samples, split.samples, group);
    const Range lines = part(g.lines, split.lines, thread / split.samples);
    Workspace space(g, nonzeros, g.lines, split, arena);
    for (space.blocks.begin(lines.begin, lines.end); space.blocks.next();) {
      const int64_t entries = space.blocks.entries();
      std::fill(space.sums, space.sums + entries, 0.f);
      with_storage(code, [&](auto tag) {
        using T = decltype(tag);
        with_form(g, [&](auto form) {
          const auto body = [&](int64_t n, const Tile& tile) {
            dot_lines<T, form.row, form.vectors>(g, space, tile, at<T>(dy) + n * written);
          };
          each_tile(g, samples, at<T>(x), {at<float>(scale), at<float>(shift)}, space.source, body);
        });
      });
      const int32_t* ranks = space.blocks.ranks;
      if (split.samples > 1) {
        for (int64_t e = 0; e < entries; ++e)
          if (ranks[e] >= 0) partial[group * stride + ranks[e]] = space.sums[e];
      } else {
        with_storage(gradient_code, [&](auto tag) {
          auto* out = at<decltype(tag)>(gradient);
          for (int64_t e = 0; e < entries; ++e)
            if (ranks[e] >= 0) put(out + ranks[e], space.sums[e], accumulate);
        });
      }
    }
  });
  if (split.samples == 1) return;
  with_storage(gradient_code, [&](auto tag) {
    auto* out = at<decltype(tag)>(gradient);
    for (int64_t rank = 0; rank < count; ++rank) {
      float sum = 0;
      for (int64_t group = 0; group < split.samples; ++group) sum += partial[group * stride + rank];
      put(out + rank, sum, accumulate);
    }
  });
}

}  // namespace

void bind_sparse_conv(nb::module_& m) {
  m.def("sparse_convolve_scratch", &convolve_scratch);
  m.def("sparse_convolve", &convolve, Release());
  m.def("sparse_weight_gradient_scratch", &weight_gradient_scratch);
  m.def("sparse_weight_gradient", &weight_gradient, Release());
}
