// Dense convolution and its input gradient: one gathering of taps, over axes that differ.
// Of a depthwise one a tile is a few pixels x the channels of a band: each is multiplied by weights of its own. Of any
// other a tile (tile.h) has pixels x output channels. Weights are packed into its order, a block of output channels at a time,
// and a line of pixels passes over a stretch of them that stays in the first cache, before the next stretch.
#include "conv.h"

#include <nanobind/stl/array.h>

#include "core.h"
#include "tile.h"

using namespace conv;

namespace {

constexpr int64_t LINE = 8 * HIGH;  // pixels kept before they are written: whole tiles and whole vectors
constexpr int64_t STRETCH = 192;      // terms of a sum whose weights stay in the first cache
static_assert(LINE % LANES == 0, "whole vectors");

// One pair of axes: its outputs, and the runs of the band that each of them sums, each within one row of taps.
struct Pattern {
  Axis y, x;
  std::vector<Run> runs;
  std::vector<int64_t> tap_rows;  // of each run, the offset

  void add(int64_t tap_row, int64_t offset, int64_t length) {
    if (!runs.empty() && tap_rows.back() == tap_row && runs.back().offset + runs.back().length == offset &&
        runs.back().length + length <= STRETCH)
      runs.back().length += length;
    else
      runs.push_back({offset, length}), tap_rows.push_back(tap_row);
  }

  // Up to where rows of outputs from `row` on read the source in the same rows of taps: the others lie in the padding,
  // a third of them in the first and last row. Where a row is less than half a tile, all go together.
  int64_t alike(int64_t row, int64_t end, int64_t height) const {
    if (2 * x.count < HIGH) return end;
    int64_t next = row + 1;
    const auto same = [&](const Tap& t) {
      return reads(row, row + 1, t.offset, height) == reads(next, next + 1, t.offset, height);
    };
    while (next < end && std::all_of(y.taps.begin(), y.taps.end(), same)) ++next;
    return next;
  }

  // Whether any of these rows of outputs reads a row of the source with that row of taps.
  bool reads(int64_t first, int64_t end, int64_t tap_row, int64_t height) const {
    return (end - 1) * y.source_step + tap_row >= 0 && first * y.source_step + tap_row < height;
  }
};

struct Gathering {
  std::vector<Axis> ys, xs;
  Span span_y, span_x;
  Map source, out;
  int64_t sources, outputs, groups, terms;  // channels of one group; weights of one output channel
  int64_t stride_out, stride_in;            // of the weights, in whole kernels
  int64_t kernel_y, kernel_x;
  bool depthwise;  // each output channel reads its own source channel: all groups are taken as one

  int64_t depth() const { return depthwise ? WIDE : sources; }  // channels of a band

  int64_t band_width() const {
    int64_t count = 0;
    for (const Axis& x : xs) count = std::max(count, x.count);
    return span_x.reach(count, xs[0].source_step);
  }
  int64_t most_rows() const {
    int64_t count = 0;
    for (const Axis& y : ys) count = std::max(count, y.count);
    return count;
  }
  int64_t band_rows(int64_t rows) const { return span_y.reach(rows, ys[0].source_step); }
  int64_t band_floats(int64_t rows) const { return band_rows(rows) * band_width() * depth(); }

  std::vector<Pattern> patterns() const {
    std::vector<Pattern> all;
    for (const Axis& y : ys)
      for (const Axis& x : xs) {
        Pattern p{y, x, {}};
        for (const Tap& ty : y.taps)
          for (const Tap& tx : x.taps) {
            const int64_t offset = ((ty.offset - span_y.first) * band_width() + tx.offset - span_x.first) * depth();
            for (int64_t i = 0; i < sources; i += STRETCH) p.add(ty.offset, offset + i, std::min(STRETCH, sources - i));
          }
        all.push_back(p);
      }
    return all;
  }
};

Gathering gathering(const Geometry& g, bool backward, bool planar_source, bool planar_out) {
  const int64_t in = g.in_channels / g.groups, out = g.out_channels / g.groups;
  Gathering r;
  if (backward) {
    r.ys = backward_axes(g.height, g.kernel_y, g.stride_y, g.padding_y, g.dilation_y);
    r.xs = backward_axes(g.width, g.kernel_x, g.stride_x, g.padding_x, g.dilation_x);
  } else {
    r.ys = {forward_axis(g.out_height, g.kernel_y, g.stride_y, g.padding_y, g.dilation_y)};
    r.xs = {forward_axis(g.out_width, g.kernel_x, g.stride_x, g.padding_x, g.dilation_x)};
  }
  r.span_y = span_of(r.ys), r.span_x = span_of(r.xs);
  r.source = backward ? g.output(planar_source) : g.input(planar_source);
  r.out = backward ? g.input(planar_out) : g.output(planar_out);
  r.sources = backward ? out : in, r.outputs = backward ? in : out, r.groups = g.groups;
  r.depthwise = is_depthwise(g);
  if (r.depthwise) r.outputs = g.groups, r.groups = 1;
  r.terms = r.sources * g.kernel_y * g.kernel_x;
  r.stride_out = backward ? 1 : in, r.stride_in = backward ? in : 1;
  r.kernel_y = g.kernel_y, r.kernel_x = g.kernel_x;
  return r;
}

// Where the packed weights of each kernel element begin, in numbers of taps: patterns one after another, each in
// the order in which it sums. A kernel element serves one pattern at most.
std::vector<int64_t> tap_order(const Gathering& g) {
  std::vector<int64_t> order(g.kernel_y * g.kernel_x, -1);
  int64_t next = 0;
  for (const Axis& y : g.ys)
    for (const Axis& x : g.xs)
      for (const Tap& ty : y.taps)
        for (const Tap& tx : x.taps) order[ty.k * g.kernel_x + tx.k] = next++;
  return order;
}

// The weights of up to WIDE output channels, [tap][source channel][output channel]. Output channels lie stride_out
// kernels apart; along one of them `extent` weights lie together, which are read and turned a square at a time.
template <class T>
void pack(const Gathering& g, const std::vector<int64_t>& order, const T* weight, int64_t channels, float* to) {
  const int64_t wide = vectors(channels) * LANES, kernel = g.kernel_y * g.kernel_x;
  const int64_t extent = g.stride_in == 1 ? g.terms : kernel, sources = extent / kernel;
  for (int64_t first = 0; first < g.sources; first += sources)
    for (int64_t o = 0; o < wide; o += LANES) {
      int64_t tap = 0, source = first;
      for (int64_t j = 0; j < extent; j += LANES) {
        const int few = static_cast<int>(std::min<int64_t>(LANES, extent - j));
        Square square = {};
        for (int k = 0; k < LANES && o + k < channels; ++k)
          square[k] = load_part(weight + ((o + k) * g.stride_out + first * g.stride_in) * kernel + j, few);
        transpose(square);
        for (int k = 0; k < few; ++k) {
          if (order[tap] >= 0) store(to + (order[tap] * g.sources + source) * wide + o, square[k]);
          if (++tap == kernel) ++source, tap = 0;
        }
      }
    }
}

// Walks over a pattern's outputs in order: a division for each would cost as much as a tile's sums.
struct Cursor {
  int64_t y, x, width;
  Cursor(int64_t number, int64_t width_) : y(number / width_), x(number % width_), width(width_) {}
  void next() {
    if (++x == width) ++y, x = 0;
  }
};

// Writes sums [count][WIDE] of up to LANES channels to a pattern's outputs, from number `first` on. Planes are written a
// channel at a time: a few pixels of every plane in turn would evict one another, as planes lie powers of two apart.
template <class T>
void write_line(const Map& map, const Pattern& p, int64_t n, int64_t channel, int lanes, int64_t first, int64_t count,
                const float* sums, Vector bias, T* out) {
  const int64_t plane = map.height * map.width;
  const bool together = p.x.step == 1 && p.y.step == 1;  // then outputs lie in the order of their numbers
  out += map.at(n, channel, 0, 0);
  Cursor cursor(first, p.x.count);
  for (int64_t i = 0; i < count; i += LANES) {
    const int few = static_cast<int>(std::min<int64_t>(LANES, count - i));
    int64_t pixels[LANES];
    for (int k = 0; k < few; ++k, cursor.next())
      pixels[k] = together ? first + i + k
                           : (p.y.start + cursor.y * p.y.step) * map.width + p.x.start + cursor.x * p.x.step;
    if (!map.planar) {
      for (int k = 0; k < few; ++k)
        store_part(out + pixels[k] * map.channels, load(sums + (i + k) * WIDE) + bias, lanes);
      continue;
    }
    Square square;
    for (int k = 0; k < LANES; ++k) square[k] = k < few ? load(sums + (i + k) * WIDE) + bias : bias;
    transpose(square);
    for (int c = 0; c < lanes; ++c, out += plane) {
      if (together) {
        store_part(out + pixels[0], square[c], few);
      } else {
        T narrow[LANES];
        store(narrow, square[c]);
        for (int k = 0; k < few; ++k) out[pixels[k]] = narrow[k];
      }
    }
    out -= lanes * plane;
  }
}

// Adds to the sums of some pixels, [count][WIDE], the products of V vectors of their channels, tap by tap.
template <int V>
void sum_depth(const float* const* pixels, int64_t count, const std::vector<const float*>& weights,
               const std::vector<int64_t>& taps, float* sums) {
  constexpr int P = 8;
  for (int64_t i = 0; i < count; i += P) {
    const float* x[P];
    for (int p = 0; p < P; ++p) x[p] = pixels[std::min(i + p, count - 1)];
    Vector sum[P * V] = {};
    for (size_t t = 0; t < taps.size(); ++t) {
      Vector w[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) w[v] = load(weights[t] + v * LANES);
#pragma GCC unroll 16
      for (int k = 0; k < P * V; ++k) sum[k] += w[k % V] * load(x[k / V] + taps[t] + k % V * LANES);
    }
    for (int64_t p = 0; p < std::min<int64_t>(P, count - i); ++p)
      for (int v = 0; v < V; ++v) store(sums + (i + p) * WIDE + v * LANES, sum[p * V + v]);
  }
}

template <class T>
struct Work {
  Gathering g;
  std::vector<Pattern> patterns;
  Source<T> source;
  const float* bias;  // or null
  T* out;
  int64_t rows;  // of each pattern, from one band

  // Output channels [first, first + channels), at most WIDE, of the rows from `row` on.
  void sum_rows(const Band& band, int64_t n, int64_t row, int64_t first, int64_t channels, const float* weights) const {
    const int V = vectors(channels);
    for (const Pattern& p : patterns) {
      const int64_t last = std::min(row + rows, p.y.count);
      for (int64_t from = row, to; from < last; from = to) {
        to = p.alike(from, last, g.source.height);
        sum_lines(p, band, n, row, from, to, first, channels, weights);
      }
      for (const Run& run : p.runs) weights += run.length * V * LANES;
    }
  }

  // The same of one pattern's rows [from, to), which are alike.
  void sum_lines(const Pattern& p, const Band& band, int64_t n, int64_t row, int64_t from, int64_t to, int64_t first,
                 int64_t channels, const float* weights) const {
    const int V = vectors(channels);
    for (int64_t line = from * p.x.count, end = to * p.x.count; line < end; line += LINE) {
      alignas(64) float sums[LINE * WIDE] = {};
      const int64_t count = std::min(LINE, end - line);
      const float* pixels[LINE];
      Cursor cursor(line, p.x.count);
      for (int64_t i = 0; i < count; ++i, cursor.next())
        pixels[i] = band.row((cursor.y - row) * p.y.source_step) + cursor.x * p.x.source_step * g.depth();
      if (g.depthwise) sum_taps(p, from, to, pixels, count, V, weights, sums);
      const float* stretch = weights;
      for (size_t r = 0; r < p.runs.size() && !g.depthwise; stretch += p.runs[r++].length * V * LANES) {
        if (!p.reads(from, to, p.tap_rows[r], g.source.height)) continue;
        for (int64_t i = 0; i < count; i += HIGH)
          TILES[V - 1][std::min<int64_t>(HIGH, count - i) - 1](pixels + i, p.runs[r], stretch, sums + i * WIDE);
      }
      for (int v = 0; v < V; ++v) {
        const int64_t channel = first + v * LANES;
        const int lanes = static_cast<int>(std::min<int64_t>(LANES, channels - v * LANES));
        const Vector add = bias ? load_part(bias + channel, lanes) : Vector{};
        write_line(g.out, p, n, channel, lanes, line, count, sums + v * LANES, add, out);
      }
    }
  }

  // The taps of a pattern that its rows [from, to) read.
  void sum_taps(const Pattern& p, int64_t from, int64_t to, const float* const* pixels, int64_t count, int V,
                const float* weights, float* sums) const {
    std::vector<const float*> used;
    std::vector<int64_t> taps;
    for (size_t r = 0; r < p.runs.size(); ++r)
      if (p.reads(from, to, p.tap_rows[r], g.source.height))
        used.push_back(weights + r * V * LANES), taps.push_back(p.runs[r].offset);
    (V == 1 ? sum_depth<1> : sum_depth<2>)(pixels, count, used, taps, sums);
  }

  // Channels [first, first + channels) of the output from weights packed [WIDE at a time][terms][WIDE].
  void run(int64_t group, int64_t first, int64_t channels, const float* packed, float* bands, int threads) const {
    const int64_t pieces = (g.most_rows() + rows - 1) / rows, size = g.band_floats(rows);
    const int64_t steps = g.out.batch * g.out.height * g.out.width * g.terms * channels / WIDE;
#pragma omp parallel for num_threads(team(threads, steps)) schedule(static)  // norms and the next layer share alike
    for (int64_t item = 0; item < g.out.batch * pieces; ++item) {
      const int64_t n = item / pieces, row = item % pieces * rows, step = g.ys[0].source_step;
      const Band band{bands + omp_get_thread_num() * size, row * step + g.span_y.first,
                      g.band_rows(std::min(rows, g.most_rows() - row)), g.span_x.first, g.band_width(),
                      group * g.sources, g.sources, g.depth()};
      if (!g.depthwise) fill_band(source, n, band);
      for (int64_t c = 0; c < channels; c += WIDE) {
        if (g.depthwise) {
          Band own = band;
          own.channel = first + c, own.channels = std::min<int64_t>(WIDE, channels - c);
          fill_band(source, n, own);
        }
        sum_rows(band, n, row, first + c, std::min<int64_t>(WIDE, channels - c), packed + c * g.terms);
      }
    }
  }
};

template <class T>
void pack_block(const Gathering& g, const T* weight, int64_t channels, float* packed, int threads) {
  const std::vector<int64_t> order = tap_order(g);
#pragma omp parallel for num_threads(team(threads, channels * g.terms))
  for (int64_t c = 0; c < channels; c += WIDE)
    pack(g, order, weight + c * g.stride_out * g.kernel_y * g.kernel_x, std::min<int64_t>(WIDE, channels - c),
         packed + c * g.terms);
}

int64_t wide(int64_t channels) { return (channels + WIDE - 1) / WIDE * WIDE; }
}  // namespace

// The block of output channels and the rows that a budget of scratch bytes allows -> {block, rows, floats}.
// Six tenths hold weights; each thread's band has its share of the rest. Never less than WIDE channels and one row.
static std::array<int64_t, 3> conv_plan(const Sizes& sizes, bool backward, int64_t budget, int threads) {
  const Gathering g = gathering(Geometry(sizes), backward, true, true);
  const int64_t floats = budget / sizeof(float);
  const int64_t most = std::max<int64_t>(WIDE, floats * 6 / 10 / std::max<int64_t>(1, g.terms) / WIDE * WIDE);
  const int64_t blocks = (g.outputs + most - 1) / most;
  const int64_t block = wide((g.outputs + blocks - 1) / blocks), left = (floats - block * g.terms) / threads;
  int64_t rows = g.most_rows();
  while (rows > 1 && g.band_floats(rows) > left) rows = (rows + 1) / 2;
  return {block, rows, block * g.terms + threads * g.band_floats(rows)};
}

// y = conv(x) (x passed through scale, shift and ReLU if given) or, backward, grad_x from grad_y.
static void conv_gather(const Sizes& sizes, bool backward, Address source, bool planar_source, Address scale,
                        Address shift, bool rectify, Address weight, int weight_storage, Address bias, Address out,
                        bool planar_out, int storage, int64_t block, int64_t rows, Address scratch, int threads) {
  const Geometry geometry(sizes);
  const Gathering g = gathering(geometry, backward, planar_source, planar_out);
  float *packed = at<float>(scratch), *bands = packed + block * g.terms;
  with_storage(storage, [&](auto type) {
    using T = decltype(type);
    const Source<T> from{g.source, at<T>(source), at<float>(scale), at<float>(shift), rectify};
    const Work<T> work{g, g.patterns(), from, at<float>(bias), at<T>(out), rows};
    for (int64_t group = 0; group < g.groups; ++group)
      for (int64_t first = 0; first < g.outputs; first += block) {
        const int64_t channels = std::min(block, g.outputs - first);
        // The weights of a group lie together: all of them are outputs x sources kernels.
        const int64_t from_kernel = group * g.outputs * g.sources + first * g.stride_out;
        with_storage(weight_storage, [&](auto weight_type) {
          const auto* w = at<decltype(weight_type)>(weight) + from_kernel * g.kernel_y * g.kernel_x;
          pack_block(g, w, channels, packed, threads);
        });
        work.run(group, group * g.outputs + first, channels, packed, bands, threads);
      }
  });
}

void bind_conv(nb::module_& m) {
  m.def("conv_plan", &conv_plan, Release());
  m.def("conv_gather", &conv_gather, Release());
}
