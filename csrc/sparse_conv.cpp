// Direct sparse convolution: forward, the gradient of the input, and the gradient of the weight at its nonzeros only.
// One block of lines is decoded, then every sample goes through it: copied to FP32 scratch band by band (batch norm and
// ReLU applied on the way, if asked for), tile after tile, so that a tile's source stays in the nearest cache while all
// lines of the block pass over it.
#include <nanobind/stl/array.h>

#include "core.h"
#include "sparse_geometry.h"
#include "sparse_tile.h"

namespace {

constexpr int64_t BLOCK = 8192;  // entries decoded at a time

struct Range { int64_t begin, end; };
Range part(int64_t size, int64_t parts, int64_t i) { return {size * i / parts, size * (i + 1) / parts}; }

struct Prologue {  // x -> relu(x * scale + shift), each channel with its own; or x as it is
  const float* scale;
  const float* shift;
  Vector operator()(Vector x, int64_t channel) const {
    if (!scale) return x;
    x = x * broadcast(scale[channel]) + broadcast(shift[channel]);
    return x < 0 ? Vector{} : x;  // a NaN stays
  }
};

// One source row [0, width) -> the columns of a plane's row.
template <class T>
void load_row(const Geometry& g, const T* source, int64_t phase, const Prologue& prologue, int64_t channel, float* row) {
  const int64_t step = g.w.step(), width = g.w.source_size();
  const int64_t first = std::max<int64_t>(0, divide_up(-phase, step) - g.left());
  const int64_t last = std::min(g.row, divide_up(width - phase, step) - g.left());
  source += step * (first + g.left()) + phase;
  for (int64_t j = first; j < last; j += 8, source += 8 * step) {
    const int lanes = static_cast<int>(std::min<int64_t>(8, last - j));
    Vector x{};
    if (step == 1) {
      x = load_part(source, lanes);
    } else {
      T few[8] = {};
      for (int i = 0; i < lanes; ++i) few[i] = source[i * step];
      x = load(few);
    }
    store_part(row + j, prologue(x, channel), lanes);
  }
}

// The rows of one sample that the grid rows [begin, begin + band_rows) read. Margins were zeroed once and are not
// touched; rows above and below the map are zeroed here, for another band may have filled them.
template <class T>
void load_band(const Geometry& g, const T* sample, int64_t begin, const Prologue& prologue, float* scratch) {
  const int64_t rows = g.band_rows + g.h.halo();
  for (int64_t c = 0; c < g.channels; ++c) {
    for (int64_t p = 0; p < g.h.planes() * g.w.planes(); ++p) {
      float* plane = scratch + c * g.channel + p * g.plane;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t y = g.h.step() * (begin + r + g.h.low) + g.h.phase(p / g.w.planes());
        if (y < 0 || y >= g.h.source_size()) {
          std::fill(plane + r * g.row, plane + (r + 1) * g.row, 0.f);
        } else {
          const T* row = sample + (c * g.h.source_size() + y) * g.w.source_size();
          load_row(g, row, g.w.phase(p % g.w.planes()), prologue, c, plane + r * g.row);
        }
      }
    }
  }
}

// visit(float of the tile, pixel of the map) for every pixel of a tile that exists; `start` is the tile's first float
// in its band, which holds the grid rows [begin, end).
template <class Visit>
void each_pixel(const Geometry& g, int64_t start, int64_t floats, Range band, int64_t klass, Visit visit) {
  for (int64_t f = 0; f < floats; ++f) {
    const int64_t i = band.begin + (start + f) / g.row, j = (start + f) % g.row;
    const int64_t y = i * g.h.classes() + klass / g.w.classes(), x = j * g.w.classes() + klass % g.w.classes();
    if (i < band.end && j < g.w.grid() && y < g.h.written_size() && x < g.w.written_size())
      visit(f, y * g.w.written_size() + x);
  }
}

// A tile is a stretch of the map's memory where rows have no margins and there is one class.
bool is_stretch(const Geometry& g) { return g.row == g.w.written_size() && g.classes() == 1; }

template <class T, int NV>
void store_tile(const Geometry& g, const Vector (&tile)[NV], T* map, int64_t start, Range band, int64_t klass) {
  if (is_stretch(g)) {
    const int64_t floats = (band.end - band.begin) * g.row - start;
    T* out = map + band.begin * g.row + start;
    for (int v = 0; v < NV && 8 * v < floats; ++v)
      store_part(out + 8 * v, tile[v], static_cast<int>(std::min<int64_t>(8, floats - 8 * v)));
    return;
  }
  T few[8 * NV];
  for (int v = 0; v < NV; ++v) store(few + 8 * v, tile[v]);
  each_pixel(g, start, 8 * NV, band, klass, [&](int64_t f, int64_t pixel) { map[pixel] = few[f]; });
}

template <class T, int NV>
void load_tile(const Geometry& g, Vector (&tile)[NV], const T* map, int64_t start, Range band) {
  if (is_stretch(g)) {
    const int64_t floats = (band.end - band.begin) * g.row - start;
    const T* in = map + band.begin * g.row + start;
    for (int v = 0; v < NV; ++v)
      tile[v] = 8 * v < floats ? load_part(in + 8 * v, static_cast<int>(std::min<int64_t>(8, floats - 8 * v))) : Vector{};
    return;
  }
  T few[8 * NV] = {};
  each_pixel(g, start, 8 * NV, band, 0, [&](int64_t f, int64_t pixel) { few[f] = map[pixel]; });
  for (int v = 0; v < NV; ++v) tile[v] = load(few + 8 * v);
}

template <class Entry, int ROUND>
void fill_tables(const Geometry& g, const Nonzeros& nonzeros, Blocks<Entry, ROUND>& blocks) {
  const int64_t kernel = g.h.kernel * g.w.kernel;
  for (int64_t p = 0; p < nonzeros.row_length; ++p) {
    const int64_t c = p / kernel, k = p % kernel;
    blocks.bin_of[p] = static_cast<int32_t>(g.bin(k) + (nonzeros.transposed ? c * g.bins() : 0));
    blocks.offset_of[p] = static_cast<int32_t>(g.offset(k) + (nonzeros.transposed ? 0 : c * g.channel * 4));
  }
}

// What one thread works with.
template <class Entry, int ROUND>
struct Workspace {
  float* source;
  Blocks<Entry, ROUND> blocks;
  float* sums;  // of the weight gradient
  Workspace(const Geometry& g, const Nonzeros& nonzeros, int64_t lines, Arena& arena)
      : source(arena.take<float>(g.channels * g.channel)),
        blocks(nonzeros, static_cast<int>(g.bins()), g.channel * 4, lines, BLOCK, arena),
        sums(ROUND > 1 ? arena.take<float>(blocks.size()) : nullptr) {
    if (!arena.base) return;
    std::fill(source, source + g.channels * g.channel, 0.f);
    fill_tables(g, nonzeros, blocks);
  }
};
using Forward = Workspace<Weighted, 1>;
using Backward = Workspace<Ranked, 4>;

template <class Space>
int64_t space_bytes(const Geometry& g, const Nonzeros& nonzeros, Split split) {
  Arena arena{nullptr};
  Space(g, nonzeros, divide_up(g.lines, split.lines), arena);
  return arena.used;
}

// One tile of one line: V is the number of vectors in a row, 0 where it is flat.
template <int V, int NV>
inline void convolve_tile(Vector (&sum)[NV], const Weighted* entries, const int32_t* starts, const char* base) {
  if constexpr (V == 0) {
    accumulate(sum, entries + starts[0], entries + starts[1], base);
  } else {
    if (starts[1] > starts[0]) {
      accumulate(sum, entries + starts[0], entries + starts[1], base);
      move_right<V>(sum);
    }
    accumulate(sum, entries + starts[1], entries + starts[2], base);
    if (starts[3] > starts[2]) {
      Vector right[NV] = {};
      accumulate(right, entries + starts[2], entries + starts[3], base);
      move_left<V>(right);
      for (int v = 0; v < NV; ++v) sum[v] += right[v];
    }
  }
}

template <class T, int V, int NV>
void convolve_lines(const Geometry& g, const Forward& space, Range band, T* out) {
  const int64_t map = g.h.written_size() * g.w.written_size();
  for (int64_t t = 0; t < g.tiles(band.end - band.begin); ++t) {
    const char* base = reinterpret_cast<const char*>(space.source + t * 8 * NV);
    const int32_t* starts = space.blocks.starts;
    for (int64_t line = space.blocks.first; line < space.blocks.last; ++line) {
      for (int64_t klass = 0; klass < g.classes(); ++klass, starts += g.groups()) {
        Vector sum[NV] = {};
        convolve_tile<V>(sum, space.blocks.entries, starts, base);
        store_tile(g, sum, out + line * map, t * 8 * NV, band, klass);
      }
    }
  }
}

template <class T, int V, int NV>
void dot_lines(const Geometry& g, const Backward& space, Range band, const T* gradient) {
  const int64_t map = g.h.written_size() * g.w.written_size();
  for (int64_t t = 0; t < g.tiles(band.end - band.begin); ++t) {
    const char* base = reinterpret_cast<const char*>(space.source + t * 8 * NV);
    const int32_t* starts = space.blocks.starts;
    for (int64_t line = space.blocks.first; line < space.blocks.last; ++line) {
      Vector whole[NV];
      load_tile(g, whole, gradient + line * map, t * 8 * NV, band);
      for (int64_t group = 0; group < g.groups(); ++group, ++starts) {
        Vector tile[NV];
        for (int v = 0; v < NV; ++v) tile[v] = whole[v];
        if constexpr (V > 0) {  // what the convolution shifts after the sum is shifted the other way before it
          if (group == 0) move_left<V>(tile);
          if (group == 2) move_right<V>(tile);
        }
        for (int32_t e = starts[0]; e < starts[1]; e += 4)
          dot_four(tile, space.blocks.entries + e, base, space.sums + e);
      }
    }
  }
}

// body(thread's number in the split) on every thread, however many there are.
template <class Body>
void on_threads(Split split, Body body) {
  const int threads = static_cast<int>(split.samples * split.lines);
#pragma omp parallel num_threads(threads)
  for (int t = omp_get_thread_num(); t < threads; t += omp_get_num_threads()) body(t);
}

// body(constants of the row form): the number of vectors in a row and in a tile.
template <int V, int NV>
struct Form { static constexpr int row_vectors = V, tile_vectors = NV; };
template <class Body>
void with_form(const Geometry& g, Body body) {
  switch (g.row_vectors) {
    case 0: return body(Form<0, 8>{});
    case 1: return body(Form<1, 8>{});
    case 2: return body(Form<2, 8>{});
    case 3: return body(Form<3, 6>{});
    case 4: return body(Form<4, 8>{});
    case 5: return body(Form<5, 5>{});
    case 6: return body(Form<6, 6>{});
    case 7: return body(Form<7, 7>{});
    case 8: return body(Form<8, 8>{});
  }
}

Nonzeros nonzeros_of(const Sizes& sizes, Address values, int code, Address index, int64_t size, int64_t count,
                     bool transposed) {
  const int64_t kernel = sizes[KERNEL_H] * sizes[KERNEL_W], length = sizes[IN_CHANNELS] * kernel;
  return {{at<uint8_t>(index), size, sizes[OUT_CHANNELS] * length}, at<void>(values), code, count,
          sizes[OUT_CHANNELS], length, transposed, transposed ? kernel : length};
}

int64_t convolve_scratch(const Sizes& sizes, bool transposed, int64_t count, int threads) {
  const Geometry g(sizes, transposed);
  const Split split = share(g, count, threads, BLOCK);
  return threads * space_bytes<Forward>(g, nonzeros_of(sizes, 0, 0, 0, 0, count, transposed), split);
}

// The convolution of x, or (transposed) the gradient of its input from that of its output.
void convolve(const Sizes& sizes, bool transposed, Address source, int code, Address values, int values_code,
              Address index, int64_t index_size, int64_t count, Address scale, Address shift, Address out,
              Address scratch, int threads) {
  const Geometry g(sizes, transposed);
  const Nonzeros nonzeros = nonzeros_of(sizes, values, values_code, index, index_size, count, transposed);
  const Split split = share(g, count, threads, BLOCK);
  const int64_t bytes = space_bytes<Forward>(g, nonzeros, split);
  const Prologue prologue{at<float>(scale), at<float>(shift)};
  const int64_t read = g.channels * g.h.source_size() * g.w.source_size();
  const int64_t written = g.lines * g.h.written_size() * g.w.written_size();
  on_threads(split, [&](int64_t thread) {
    Arena arena{at<uint8_t>(scratch) + thread * bytes};
    const Range samples = part(g.samples, split.samples, thread % split.samples);
    const Range lines = part(g.lines, split.lines, thread / split.samples);
    Forward space(g, nonzeros, divide_up(g.lines, split.lines), arena);
    with_storage(code, [&](auto tag) {
      using T = decltype(tag);
      for (space.blocks.begin(lines.begin, lines.end); space.blocks.next();) {
        for (int64_t n = samples.begin; n < samples.end; ++n) {
          for (int64_t y = 0; y < g.h.grid(); y += g.band_rows) {
            const Range band{y, std::min(g.h.grid(), y + g.band_rows)};
            load_band(g, at<T>(source) + n * read, y, prologue, space.source);
            with_form(g, [&](auto form) {
              convolve_lines<T, form.row_vectors, form.tile_vectors>(g, space, band, at<T>(out) + n * written);
            });
          }
        }
      }
    });
  });
}

int64_t weight_gradient_scratch(const Sizes& sizes, int64_t count, int threads) {
  const Geometry g(sizes, false);
  const Split split = share(g, count, threads, BLOCK);
  const int64_t partial = split.samples > 1 ? split.samples * round_up(count * 4, 64) : 0;
  return threads * space_bytes<Backward>(g, nonzeros_of(sizes, 0, 0, 0, 0, count, false), split) + partial;
}

// gradient[rank] (+)= sum over samples and pixels. Each group of samples has its own FP32 sums, which are added in a
// fixed order: the result depends on the number of threads, but not on their timing.
void weight_gradient(const Sizes& sizes, Address x, Address dy, int code, Address index, int64_t index_size,
                     int64_t count, Address scale, Address shift, Address gradient, int gradient_code, bool accumulate,
                     Address scratch, int threads) {
  const Geometry g(sizes, false);
  const Nonzeros nonzeros = nonzeros_of(sizes, 0, 0, index, index_size, count, false);
  const Split split = share(g, count, threads, BLOCK);
  const int64_t bytes = space_bytes<Backward>(g, nonzeros, split);
  const Prologue prologue{at<float>(scale), at<float>(shift)};
  const int64_t read = g.channels * g.h.source_size() * g.w.source_size();
  const int64_t written = g.lines * g.h.written_size() * g.w.written_size();
  float* partial = at<float>(scratch + threads * bytes);
  const int64_t stride = round_up(count, 16);
  const auto put = [&](int64_t rank, float sum) {
    with_storage(gradient_code, [&](auto tag) {
      auto* out = at<decltype(tag)>(gradient) + rank;
      store_part(out, broadcast(sum) + (accumulate ? load_part(out, 1) : Vector{}), 1);
    });
  };
  on_threads(split, [&](int64_t thread) {
    Arena arena{at<uint8_t>(scratch) + thread * bytes};
    const int64_t group = thread % split.samples;
    const Range samples = part(g.samples, split.samples, group);
    const Range lines = part(g.lines, split.lines, thread / split.samples);
    Backward space(g, nonzeros, divide_up(g.lines, split.lines), arena);
    for (space.blocks.begin(lines.begin, lines.end); space.blocks.next();) {
      const int64_t entries = space.blocks.starts[(space.blocks.last - space.blocks.first) * g.bins()];
      std::fill(space.sums, space.sums + entries, 0.f);
      with_storage(code, [&](auto tag) {
        using T = decltype(tag);
        for (int64_t n = samples.begin; n < samples.end; ++n) {
          for (int64_t y = 0; y < g.h.grid(); y += g.band_rows) {
            const Range band{y, std::min(g.h.grid(), y + g.band_rows)};
            load_band(g, at<T>(x) + n * read, y, prologue, space.source);
            with_form(g, [&](auto form) {
              dot_lines<T, form.row_vectors, form.tile_vectors>(g, space, band, at<T>(dy) + n * written);
            });
          }
        }
      });
      for (int64_t e = 0; e < entries; ++e) {
        const int32_t rank = space.blocks.entries[e].rank;
        if (rank < 0) continue;
        if (split.samples > 1) partial[group * stride + rank] = space.sums[e];
        else put(rank, space.sums[e]);
      }
    }
  });
  if (split.samples == 1) return;
  for (int64_t rank = 0; rank < count; ++rank) {
    float sum = 0;
    for (int64_t group = 0; group < split.samples; ++group) sum += partial[group * stride + rank];
    put(rank, sum);
  }
}

}  // namespace

void bind_sparse_conv(nb::module_& m) {
  m.def("sparse_convolve_scratch", &convolve_scratch);
  m.def("sparse_convolve", &convolve, Release());
  m.def("sparse_weight_gradient_scratch", &weight_gradient_scratch);
  m.def("sparse_weight_gradient", &weight_gradient, Release());
}
