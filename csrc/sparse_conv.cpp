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
};

// `count` pixels, `step` apart in the source, side by side in scratch.
template <class T>
void copy_pixels(const T* source, int64_t step, int64_t count, const Prologue& prologue, int64_t channel, float* out) {
  const Vector scale = broadcast(prologue.scale ? prologue.scale[channel] : 1.f);
  const Vector shift = broadcast(prologue.scale ? prologue.shift[channel] : 0.f);
  const auto copy = [&](const T* from, int64_t j, int lanes) {
    Vector x = load_part(from, lanes);
    if (prologue.scale) x = x * scale + shift, x = x < 0 ? Vector{} : x;  // a NaN stays
    store_part(out + j, x, lanes);
  };
  for (int64_t j = 0; j < count; j += LANES, source += LANES * step) {
    const int lanes = static_cast<int>(std::min<int64_t>(LANES, count - j));
    if (step == 1) {
      copy(source, j, lanes);
    } else {
      T few[LANES];
      for (int i = 0; i < lanes; ++i) few[i] = source[i * step];
      copy(few, j, lanes);
    }
  }
}

// The part of [0, size) of a plane's axis that exists in the source: `first` is the grid place of index 0.
Range existing(const Axis& axis, int64_t plane, int64_t first, int64_t size) {
  const int64_t phase = axis.phase(plane), step = axis.step();
  return {std::max<int64_t>(0, divide_up(-phase, step) - first),
          std::min(size, divide_up(axis.source_size() - phase, step) - first)};
}

// The rows of one sample that the grid rows [begin, begin + band_rows) read. Margins were zeroed once and are not
// touched; where there are several bands, rows beyond the map are zeroed here, for another band has filled them.
template <class T>
void load_band(const Geometry& g, const T* sample, int64_t begin, const Prologue& prologue, float* scratch) {
  const int64_t rows = g.band_rows + g.h.halo(), width = g.w.source_size(), step = g.h.step();
  for (int64_t p = 0; p < g.h.planes() * g.w.planes(); ++p) {
    const int64_t plane_y = p / g.w.planes(), plane_x = p % g.w.planes();
    const Range y = existing(g.h, plane_y, begin + g.h.low, rows), x = existing(g.w, plane_x, g.left(), g.row);
    const T* source = sample + (step * (begin + g.h.low + y.begin) + g.h.phase(plane_y)) * width +
                      g.w.step() * (g.left() + x.begin) + g.w.phase(plane_x);
    float* plane = scratch + p * g.plane;
    const bool in_one = step == 1 && g.w.step() == 1 && x.end - x.begin == g.row && g.row == width;
    for (int64_t c = 0; c < g.channels; ++c, source += g.h.source_size() * width, plane += g.channel) {
      if (g.band_rows < g.h.grid()) {
        std::fill(plane, plane + y.begin * g.row, 0.f);
        std::fill(plane + std::max(y.begin, y.end) * g.row, plane + rows * g.row, 0.f);
      }
      if (in_one) {
        copy_pixels(source, 1, (y.end - y.begin) * g.row, prologue, c, plane + y.begin * g.row);
      } else {
        for (int64_t r = y.begin; r < y.end; ++r)
          copy_pixels(source + (r - y.begin) * step * width, g.w.step(), x.end - x.begin, prologue, c,
                      plane + r * g.row + x.begin);
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
IN_PLACE void store_tile(const Geometry& g, const Vector (&tile)[NV], T* map, int64_t start, Range band, int64_t klass) {
  const int64_t floats = (band.end - band.begin) * g.row - start;
  if (is_stretch(g) && floats >= LANES * NV) {
    T* out = map + band.begin * g.row + start;
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) store(out + LANES * v, tile[v]);
    return;
  }
  T few[LANES * NV];
  for (int v = 0; v < NV; ++v) store(few + LANES * v, tile[v]);
  each_pixel(g, start, LANES * NV, band, klass, [&](int64_t f, int64_t pixel) { map[pixel] = few[f]; });
}

template <class T, int NV>
IN_PLACE void load_tile(const Geometry& g, Vector (&tile)[NV], const T* map, int64_t start, Range band) {
  const int64_t floats = (band.end - band.begin) * g.row - start;
  if (is_stretch(g) && floats >= LANES * NV) {
    const T* in = map + band.begin * g.row + start;
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) tile[v] = load(in + LANES * v);
    return;
  }
  T few[LANES * NV] = {};
  each_pixel(g, start, LANES * NV, band, 0, [&](int64_t f, int64_t pixel) { few[f] = map[pixel]; });
  for (int v = 0; v < NV; ++v) tile[v] = load(few + LANES * v);
}

// What one thread works with.
struct Workspace {
  float* source;
  Blocks blocks;
  float* sums;  // forward: of the chunks so far, a tile for each line; weight gradient: of each entry
  Workspace(const Geometry& g, const Nonzeros& nonzeros, int64_t lines, Arena& arena)
      : source(arena.take<float>((g.channels + 1) * g.channel)), blocks(nonzeros, g.channel * 4, lines, BLOCK, arena) {
    const int64_t tiles = g.chunks() > 1 ? lines * g.classes() * g.tile_vectors * LANES : 0;
    sums = arena.take<float>(nonzeros.ranked ? blocks.size() : tiles);
    if (!arena.base) return;
    std::fill(source, source + (g.channels + 1) * g.channel, 0.f);
    for (int64_t k = 0; k < nonzeros.kernel; ++k) {
      blocks.group_of[k] = static_cast<int32_t>(g.group(k));
      blocks.offset_of[k] = static_cast<int32_t>(g.offset(k));
    }
  }
};

int64_t workspace_bytes(const Geometry& g, const Nonzeros& nonzeros, Split split) {
  Arena arena{nullptr};
  Workspace(g, nonzeros, divide_up(g.lines, split.lines), arena);
  return arena.used;
}

// One tile of one line, whose bins start at `bin`: V is the number of vectors in a row, 0 where it is flat.
template <int V, int NV>
IN_PLACE void convolve_tile(Vector (&sum)[NV], const Blocks& blocks, int64_t bin, const char* base) {
  const int32_t *starts = blocks.starts + bin, *ends = blocks.ends + bin;
  if constexpr (V == 0) {
    accumulate(sum, blocks, starts[0], ends[0], base);
  } else {
    if (ends[0] > starts[0]) {
      accumulate(sum, blocks, starts[0], ends[0], base);
      move_right<V>(sum);
    }
    accumulate(sum, blocks, starts[1], ends[1], base);
    if (ends[2] > starts[2]) {
      Vector right[NV] = {};
      accumulate(right, blocks, starts[2], ends[2], base);
      move_left<V>(right);
      for (int v = 0; v < NV; ++v) sum[v] += right[v];
    }
  }
}

template <class T, int V, int NV>
void convolve_lines(const Geometry& g, const Workspace& space, Range band, T* out) {
  const Blocks& blocks = space.blocks;
  const int64_t map = g.h.written_size() * g.w.written_size(), classes = g.classes(), chunks = g.chunks();
  for (int64_t t = 0; t < g.tiles(band.end - band.begin); ++t) {
    const char* base = reinterpret_cast<const char*>(space.source + t * LANES * NV);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      for (int64_t line = blocks.first; line < blocks.last; ++line) {
        for (int64_t klass = 0; klass < classes; ++klass) {
          float* sums = space.sums + ((line - blocks.first) * classes + klass) * LANES * NV;
          Vector sum[NV] = {};
          convolve_tile<V>(sum, blocks, (((line - blocks.first) * chunks + chunk) * classes + klass) * g.shifts(), base);
          if (chunk > 0) add_tile(sum, sums);
          if (chunk + 1 < chunks) keep_tile(sum, sums);
          else store_tile(g, sum, out + line * map, t * LANES * NV, band, klass);
        }
      }
    }
  }
}

template <class T, int V, int NV>
void dot_lines(const Geometry& g, const Workspace& space, Range band, const T* gradient) {
  const Blocks& blocks = space.blocks;
  const int64_t map = g.h.written_size() * g.w.written_size(), chunks = g.chunks(), shifts = g.shifts();
  for (int64_t t = 0; t < g.tiles(band.end - band.begin); ++t) {
    const char* base = reinterpret_cast<const char*>(space.source + t * LANES * NV);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      for (int64_t line = blocks.first; line < blocks.last; ++line) {
        Vector whole[NV];
        load_tile(g, whole, gradient + line * map, t * LANES * NV, band);
        for (int64_t shift = 0; shift < shifts; ++shift) {
          Vector tile[NV];
          for (int v = 0; v < NV; ++v) tile[v] = whole[v];
          if constexpr (V > 0) {  // what the convolution shifts after the sum is shifted the other way before it
            if (shift == 0) move_left<V>(tile);
            if (shift == 2) move_right<V>(tile);
          }
          const int64_t bin = ((line - blocks.first) * chunks + chunk) * shifts + shift;
          dot(tile, blocks.offsets, blocks.starts[bin], blocks.ends[bin], base, space.sums);
        }
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

Nonzeros nonzeros_of(const Sizes& sizes, const Geometry& g, bool ranked, Address values, int code, Address index,
                     int64_t size, int64_t count) {
  const int64_t kernel = sizes[KERNEL_H] * sizes[KERNEL_W], length = sizes[IN_CHANNELS] * kernel;
  return {{at<uint8_t>(index), size, sizes[OUT_CHANNELS] * length}, ranked, at<void>(values), code, count,
          sizes[OUT_CHANNELS], length, kernel, g.h.transposed, g.chunks(), g.chunk_channels, g.groups()};
}

int64_t convolve_scratch(const Sizes& sizes, bool transposed, int64_t count, int threads) {
  const Geometry g(sizes, transposed);
  const Split split = share(g, count, threads, BLOCK);
  return threads * workspace_bytes(g, nonzeros_of(sizes, g, false, 0, 0, 0, 0, count), split);
}

// The convolution of x, or (transposed) the gradient of its input from that of its output.
void convolve(const Sizes& sizes, bool transposed, Address source, int code, Address values, int values_code,
              Address index, int64_t index_size, int64_t count, Address scale, Address shift, Address out,
              Address scratch, int threads) {
  const Geometry g(sizes, transposed);
  const Nonzeros nonzeros = nonzeros_of(sizes, g, false, values, values_code, index, index_size, count);
  const Split split = share(g, count, threads, BLOCK);
  const int64_t bytes = workspace_bytes(g, nonzeros, split);
  const Prologue prologue{at<float>(scale), at<float>(shift)};
  const int64_t read = g.channels * g.h.source_size() * g.w.source_size();
  const int64_t written = g.lines * g.h.written_size() * g.w.written_size();
  on_threads(split, [&](int64_t thread) {
    Arena arena{at<uint8_t>(scratch) + thread * bytes};
    const Range samples = part(g.samples, split.samples, thread % split.samples);
    const Range lines = part(g.lines, split.lines, thread / split.samples);
    Workspace space(g, nonzeros, divide_up(g.lines, split.lines), arena);
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

template <class T>
inline void put(T* out, float sum, bool accumulate) {
  store_part(out, broadcast(accumulate ? scalar(*out) + sum : sum), 1);
}
inline void put(float* out, float sum, bool accumulate) { *out = accumulate ? *out + sum : sum; }

int64_t weight_gradient_scratch(const Sizes& sizes, int64_t count, int threads) {
  const Geometry g(sizes, false);
  const Split split = share(g, count, threads, BLOCK);
  const int64_t partial = split.samples > 1 ? split.samples * round_up(count * 4, 64) : 0;
  return threads * workspace_bytes(g, nonzeros_of(sizes, g, true, 0, 0, 0, 0, count), split) + partial;
}

// gradient[rank] (+)= sum over samples and pixels. Each group of samples has its own FP32 sums, which are added in a
// fixed order: the result depends on the number of threads, but not on their timing.
void weight_gradient(const Sizes& sizes, Address x, Address dy, int code, Address index, int64_t index_size,
                     int64_t count, Address scale, Address shift, Address gradient, int gradient_code, bool accumulate,
                     Address scratch, int threads) {
  const Geometry g(sizes, false);
  const Nonzeros nonzeros = nonzeros_of(sizes, g, true, 0, 0, index, index_size, count);
  const Split split = share(g, count, threads, BLOCK);
  const int64_t bytes = workspace_bytes(g, nonzeros, split);
  const Prologue prologue{at<float>(scale), at<float>(shift)};
  const int64_t read = g.channels * g.h.source_size() * g.w.source_size();
  const int64_t written = g.lines * g.h.written_size() * g.w.written_size();
  float* partial = at<float>(scratch + threads * bytes);
  const int64_t stride = round_up(count, 16);
  on_threads(split, [&](int64_t thread) {
    Arena arena{at<uint8_t>(scratch) + thread * bytes};
    const int64_t group = thread % split.samples;
    const Range samples = part(g.samples, split.samples, group);
    const Range lines = part(g.lines, split.lines, thread / split.samples);
    Workspace space(g, nonzeros, divide_up(g.lines, split.lines), arena);
    for (space.blocks.begin(lines.begin, lines.end); space.blocks.next();) {
      const int64_t entries = space.blocks.entries();
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
