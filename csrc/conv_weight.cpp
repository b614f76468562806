// The weight gradient of a dense convolution: dW[o][i][k] = sum over samples and outputs of dy[o] x[i, at tap k].
// Registers hold pairs (tap, input channel) x WIDE output channels over the outputs of a band (pairs.h). A block of
// output channels is summed over the whole batch in FP32 before it is rounded to the storage of the gradient, or over
// each half of it, where there is room for two sums. Threads share out the halves, and of each half the sums, and fill
// bands of their own: none waits for another, and the order of a sum does not depend on how many there are.
#include "conv.h"

#include <nanobind/stl/array.h>

#include "core.h"
#include "pairs.h"

using namespace conv;

namespace {

constexpr int64_t ENOUGH = 256;  // outputs that pay for loading and storing the sums; longer sums lose digits

// A thread's share of the tasks, each HIGH pairs of WIDE output channels, and the wides that they belong to.
struct Share {
  int64_t begin, end, first, last;
  int64_t wides() const { return last - first; }
};

struct Correlation {
  Axis y, x;
  Span span_y, span_x;
  Map source, grad;
  int64_t sources, outputs, terms;  // channels of one group; weights of one output channel
  int64_t groups;
  bool depthwise;  // each output channel reads its own source channel: all groups are taken as one
  int64_t samples, rows;            // whose outputs are summed from one band
  int64_t halves;                   // of the batch, each with sums of its own: 1 or 2

  int64_t band_width() const { return span_x.reach(x.count, x.source_step); }
  int64_t band_rows() const { return span_y.reach(rows, y.source_step); }
  int64_t depth() const { return depthwise ? WIDE : sources; }  // channels of a band
  int64_t band_floats() const { return samples * band_rows() * band_width() * depth(); }
  int64_t grad_floats() const { return samples * rows * x.count * WIDE; }

  int64_t first_sample(int64_t half) const { return source.batch * half / halves; }
  int64_t pieces() const { return divide_up(terms, HIGH); }

  // The sums over one half of the batch, and where those of a task begin: [WIDE channels at a time][pair][WIDE].
  int64_t sum_floats(int64_t wides) const { return wides * terms * WIDE; }
  int64_t first_sum(int64_t task) const { return (task / pieces() * terms + task % pieces() * HIGH) * WIDE; }

  // Part `part` of the tasks of `wides` times WIDE output channels.
  Share share(int64_t wides, int64_t part, int64_t parts) const {
    const int64_t tasks = wides * pieces(), begin = tasks * part / parts, end = tasks * (part + 1) / parts;
    return {begin, end, begin / pieces(), begin == end ? begin / pieces() : (end - 1) / pieces() + 1};
  }
  // Room for the bands of any one of the parts.
  int64_t share_floats(int64_t wides, int64_t parts) const {
    int64_t most = 0;
    for (int64_t part = 0; part < parts; ++part) most = std::max(most, share(wides, part, parts).wides());
    return band_floats() + most * grad_floats();
  }

  // The rows of outputs in which a pair reads the source: from the first up to the end.
  int64_t first_row(int64_t pair) const { return std::max<int64_t>(0, divide_up(-tap_row(pair), y.source_step)); }
  int64_t end_row(int64_t pair) const { return std::max<int64_t>(0, divide_up(source.height - tap_row(pair), y.source_step)); }
  int64_t tap_row(int64_t pair) const { return y.taps[pair / (terms / y.taps.size())].offset; }

  std::vector<int64_t> offsets() const {  // of each pair in the band: [tap y][tap x][source channel]
    std::vector<int64_t> all;
    for (const Tap& ty : y.taps)
      for (const Tap& tx : x.taps)
        for (int64_t i = 0; i < sources; ++i)
          all.push_back(((ty.offset - span_y.first) * band_width() + tx.offset - span_x.first) * depth() + i);
    return all;
  }
};

Correlation correlation(const Geometry& g, bool planar_x, bool planar_grad, int64_t samples, int64_t rows,
                        int64_t halves) {
  Correlation c;
  c.y = forward_axis(g.out_height, g.kernel_y, g.stride_y, g.padding_y, g.dilation_y);
  c.x = forward_axis(g.out_width, g.kernel_x, g.stride_x, g.padding_x, g.dilation_x);
  c.span_y = span_of({c.y}), c.span_x = span_of({c.x});
  c.source = g.input(planar_x), c.grad = g.output(planar_grad);
  c.sources = g.in_channels / g.groups, c.outputs = g.out_channels / g.groups;
  c.groups = g.groups, c.depthwise = is_depthwise(g);
  if (c.depthwise) c.outputs = g.groups, c.groups = 1;
  c.terms = c.sources * g.kernel_y * g.kernel_x;
  c.samples = samples, c.rows = rows, c.halves = halves;
  return c;
}

template <class T>
struct Work {
  Correlation c;
  Source<T> source, grad;
  std::vector<int64_t> offsets;

  // Adds the products of some tasks, each HIGH pairs of WIDE output channels, over all outputs of the bands. The
  // gradient's bands, [WIDE channels at a time][output][WIDE], hold the share's wides alone.
  void sum_tasks(const Band& band, const Band& grads, int64_t samples, Share share, int64_t channels,
                 float* sums) const {
    const int64_t pieces = c.pieces(), row = band.width * band.stride;
    for (int64_t task = share.begin; task < share.end; ++task) {
      const int64_t wide = task / pieces, pair = task % pieces * HIGH;
      const int few = static_cast<int>(std::min<int64_t>(HIGH, c.terms - pair));
      // Rows of outputs that these pairs read in the padding alone add nothing.
      const int64_t first = std::max(grads.top, c.first_row(pair + few - 1));
      const int64_t rows = std::min(grads.top + grads.rows, c.end_row(pair)) - first;
      if (rows <= 0) continue;
      const int64_t skipped = first - grads.top, width = grads.width * WIDE;
      const Outputs outputs{samples, rows, grads.width, band.rows * row, c.y.source_step * row,
                            c.x.source_step * band.stride, (grads.rows - rows) * width};
      (c.depthwise ? TABLES<true> : TABLES<false>)[vectors(channels - wide * WIDE) - 1][few - 1](
          band.data + skipped * outputs.row_step, &offsets[pair],
          grads.data + (wide - share.first) * c.grad_floats() + skipped * width, outputs,
          sums + c.first_sum(task));
    }
  }

  // One share of the sums of output channels [first, first + channels), over a half of the batch.
  void sum_share(int64_t group, int64_t first, int64_t channels, int64_t half, Share share, float* sums,
                 float* bands) const {
    if (c.depthwise && share.wides() > 1) {  // each reads other source channels
      for (int64_t wide = share.first, pieces = c.pieces(); wide < share.last; ++wide)
        sum_share(group, first, channels, half,
                  {std::max(share.begin, wide * pieces), std::min(share.end, (wide + 1) * pieces), wide, wide + 1}, sums,
                  bands);
      return;
    }
    const int64_t from = c.depthwise ? first + share.first * WIDE : group * c.sources;
    const int64_t sources = c.depthwise ? std::min<int64_t>(WIDE, first + channels - from) : c.sources;
    float* grads = bands + c.band_floats();
    for (int64_t task = share.begin; task < share.end; ++task)  // by the core that adds to them
      std::fill(sums + c.first_sum(task), sums + c.first_sum(task + 1), 0.0f);
    std::fill(grads, grads + share.wides() * c.grad_floats(), 0.0f);  // lanes without a channel stay zero
    const int64_t end = c.first_sample(half + 1);
    for (int64_t n = c.first_sample(half); n < end; n += c.samples)
      for (int64_t row = 0; row < c.y.count; row += c.rows) {
        const int64_t samples = std::min(c.samples, end - n), rows = std::min(c.rows, c.y.count - row);
        const Band band{bands, row * c.y.source_step + c.span_y.first, c.span_y.reach(rows, c.y.source_step),
                        c.span_x.first, c.band_width(), from, sources, c.depth()};
        const Band grad_band{grads, row, rows, 0, c.x.count, first, channels, WIDE};
        for (int64_t i = 0; i < samples; ++i) {
          fill(source, n + i, band, i);
          for (int64_t wide = share.first; wide < share.last; ++wide) {
            Band part = grad_band;
            part.data += (wide - share.first) * c.grad_floats();
            part.channel += wide * WIDE;
            part.channels = std::min<int64_t>(WIDE, channels - wide * WIDE);
            fill(grad, n + i, part, i);
          }
        }
        sum_tasks(band, grad_band, samples, share, channels, sums);
      }
  }

  // Fills the band of a sample, the i-th of those that lie one after another.
  void fill(const Source<T>& from, int64_t n, Band band, int64_t i) const {
    band.data += i * band.rows * band.width * band.stride;
    fill_band(from, n, band);
  }

  // The sums of output channels [first, first + channels) of a group: [half][WIDE at a time][pair][WIDE].
  void run(int64_t group, int64_t first, int64_t channels, float* sums, float* bands, int threads) const {
    const int64_t wides = divide_up(channels, WIDE);
    const int size = team(threads, c.source.batch * c.y.count * c.x.count * c.terms * wides);
    const int64_t parts = size % c.halves ? size : size / c.halves;  // of each half, so that all threads have as many
#pragma omp parallel for num_threads(size) schedule(static, 1)
    for (int64_t i = 0; i < c.halves * parts; ++i)
      sum_share(group, first, channels, i / parts, c.share(wides, i % parts, parts),
                sums + i / parts * c.sum_floats(wides), bands + omp_get_thread_num() * c.share_floats(wides, parts));
  }

  // Rounds (or adds) the sums of `channels` output channels to their weights [channel][source channel][tap],
  // turned a square at a time.
  template <class W>
  void finish(const float* sums, int64_t channels, bool accumulate, W* out, int threads) const {
    const int64_t taps = c.terms / c.sources, second = c.sum_floats(divide_up(channels, WIDE));
#pragma omp parallel for num_threads(team(threads, channels * c.terms))
    for (int64_t o = 0; o < channels; o += LANES) {
      const float* from = sums + c.sum_floats(o / WIDE) + o % WIDE;
      int64_t tap = 0, source_ = 0;
      for (int64_t j = 0; j < c.terms; j += LANES) {
        const int few = static_cast<int>(std::min<int64_t>(LANES, c.terms - j));
        Square square = {};
        for (int k = 0; k < few; ++k) {
          const float* sum = from + (tap * c.sources + source_) * WIDE;
          square[k] = c.halves == 1 ? load(sum) : load(sum) + load(sum + second);
          if (++tap == taps) ++source_, tap = 0;
        }
        transpose(square);
        for (int64_t k = 0; k < LANES && o + k < channels; ++k) {
          W* to = out + (o + k) * c.terms + j;
          store_part(to, accumulate ? load_part(to, few) + square[k] : square[k], few);
        }
      }
    }
  }
};
}  // namespace

// What a budget of scratch bytes allows two threads -> {block of output channels, samples, rows, halves, floats}. Six
// tenths hold sums, the rest the threads' bands of source and gradient; a third thread and more add theirs, for the
// order of the sums must not depend on them. At least WIDE channels and one row of one sample.
static std::array<int64_t, 5> conv_weight_plan(const Sizes& sizes, int64_t budget, int threads) {
  Correlation c = correlation(Geometry(sizes), true, true, 1, 1, 1);
  const int64_t floats = budget / static_cast<int64_t>(sizeof(float));
  const int64_t most = std::max<int64_t>(1, floats * 6 / 10 / c.terms / WIDE), all = divide_up(c.outputs, WIDE);
  const int64_t wides = divide_up(all, divide_up(all, most));
  // Threads that have the same sums read other samples: of the same samples each would fill the source's band.
  if (!c.depthwise && c.source.batch > 1 && 2 * all <= most) c.halves = 2;
  const auto need = [&](int64_t samples, int64_t rows, int64_t parts) {
    c.samples = samples, c.rows = rows;
    return c.halves * c.sum_floats(wides) + parts * c.share_floats(wides, c.halves == 2 ? 1 : parts);
  };
  int64_t samples = 1, rows = std::min(c.y.count, divide_up(ENOUGH, c.x.count));
  while (rows > 1 && need(1, rows, 2) > floats) rows = (rows + 1) / 2;
  while (samples * c.halves < c.source.batch && samples * rows * c.x.count < ENOUGH &&
         need(samples + 1, rows, 2) <= floats)
    ++samples;
  return {wides * WIDE, samples, rows, c.halves, std::max(need(samples, rows, threads), need(samples, rows, 1))};
}

static void conv_weight_gradient(const Sizes& sizes, Address grad, bool planar_grad, Address x, bool planar_x,
                                 Address scale, Address shift, bool rectify, int storage, Address out,
                                 int out_storage, bool accumulate, int64_t block, int64_t samples, int64_t rows,
                                 int64_t halves, Address scratch, int threads) {
  const Geometry geometry(sizes);
  const Correlation c = correlation(geometry, planar_x, planar_grad, samples, rows, halves);
  float *sums = at<float>(scratch), *bands = sums + halves * block * c.terms;
  with_storage(storage, [&](auto type) {
    using T = decltype(type);
    const Work<T> work{c, {c.source, at<T>(x), at<float>(scale), at<float>(shift), rectify},
                       {c.grad, at<T>(grad), nullptr, nullptr, false}, c.offsets()};
    for (int64_t group = 0; group < c.groups; ++group)
      for (int64_t first = 0; first < c.outputs; first += block) {
        const int64_t channels = std::min(block, c.outputs - first), channel = group * c.outputs + first;
        work.run(group, channel, channels, sums, bands, threads);
        with_storage(out_storage, [&](auto out_type) {
          work.finish(sums, channels, accumulate, at<decltype(out_type)>(out) + channel * c.terms, threads);
        });
      }
  });
}

void bind_conv_weight(nb::module_& m) {
  m.def("conv_weight_plan", &conv_weight_plan, Release());
  m.def("conv_weight_gradient", &conv_weight_gradient, Release());
}
