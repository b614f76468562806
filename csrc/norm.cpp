// Batch norm over a map of (batch, channels, pixels), fused with ReLU: storage of any width, arithmetic in FP32,
// sums over the map in FP64. Both layouts are read as strips: vectors a fixed step apart that belong to one
// channel (planar: pixels inside) or to LANES neighbouring channels (rows: channels inside).
#include <algorithm>
#include <cmath>

#include "core.h"
#include "doubles.h"

namespace {

// A map is summed in a fixed number of parts, so that the sums do not depend on the number of threads.
constexpr int64_t PARTS = 8;
constexpr int64_t STRIP = 256;  // vectors of a plane whose sums stay in FP32 before they join the FP64 totals
constexpr int64_t BLOCK = 16;   // the same for rows; a block of rows stays in the first cache

struct Map {
  int64_t batch, channels, pixels;
  bool planar;
  int64_t gap = 0;  // values of other channels between two samples of x, where it is a part of a larger planar map
  int64_t rows() const { return batch * pixels; }
};

struct Strip {
  int64_t channel, offset, step, count;
  int lanes;
  int64_t gaps = 0;  // values of other channels before it
};

// The strips of one part of a map, in the order of memory.
template <class F>
void each_strip(const Map& map, int64_t part, F body) {
  const int64_t lines = map.planar ? map.batch * map.channels : map.rows();
  const int64_t begin = lines * part / PARTS, end = lines * (part + 1) / PARTS;
  if (map.planar) {
    const int64_t whole = map.pixels / LANES;
    const int rest = static_cast<int>(map.pixels % LANES);
    for (int64_t plane = begin; plane < end; ++plane) {
      const int64_t first = plane * map.pixels, channel = plane % map.channels, gaps = plane / map.channels * map.gap;
      for (int64_t v = 0; v < whole; v += STRIP)
        body(Strip{channel, first + v * LANES, LANES, std::min(STRIP, whole - v), LANES, gaps});
      if (rest) body(Strip{channel, first + whole * LANES, LANES, 1, rest, gaps});
    }
    return;
  }
  for (int64_t row = begin; row < end; row += BLOCK)
    for (int64_t c = 0; c < map.channels; c += LANES)
      body(Strip{c, row * map.channels + c, map.channels, std::min(BLOCK, end - row),
                 static_cast<int>(std::min<int64_t>(LANES, map.channels - c))});
}

// A thread has the same samples in every pass, which are still in its cache.
template <class F>
void each_part(const Map& map, int threads, F body) {
#pragma omp parallel for num_threads(team(threads, map.rows() * map.channels)) schedule(static)
  for (int64_t part = 0; part < PARTS; ++part) body(part);
}

// Calls `body(offset, lanes, turn)` along a strip. Full vectors go four at a time, and `turn` counts them, so that
// a sum can be kept in four pieces that do not wait for one another.
template <class F>
inline void along(const Strip& s, F body) {
  int64_t i = 0;
  if (s.lanes == LANES)
    for (; i + 4 <= s.count; i += 4)
      for (int turn = 0; turn < 4; ++turn) body(s.offset + (i + turn) * s.step, LANES, turn);
  for (; i < s.count; ++i) body(s.offset + i * s.step, s.lanes, 0);
}

// A coefficient of the strip's channels, one a lane.
inline Vector spread(const Map& map, const float* coefficient, const Strip& s) {
  return map.planar ? broadcast(coefficient[s.channel]) : load_part(coefficient + s.channel, s.lanes);
}

// Two sums over a strip, in pieces, and how they join the totals of their channels.
struct Sums {
  Vector first[4] = {}, second[4] = {};

  void join(const Map& map, const Strip& s, double* totals) const {
    Vector a = (first[0] + first[1]) + (first[2] + first[3]), b = (second[0] + second[1]) + (second[2] + second[3]);
    double *to_a = totals + s.channel, *to_b = to_a + map.channels;
    if (map.planar) {
      for (int i = s.lanes; i < LANES; ++i) a[i] = b[i] = 0;
      *to_a += sum_lanes(a);
      *to_b += sum_lanes(b);
    } else {
      for (int i = 0; i < s.lanes; ++i) to_a[i] += a[i], to_b[i] += b[i];
    }
  }
};

// `sum(part, totals)` adds a part's sums to its own totals (2 x channels doubles); they end joined in the first.
template <class F>
void sum_parts(const Map& map, double* totals, int threads, F sum) {
  const int64_t size = 2 * map.channels;
  std::fill(totals, totals + PARTS * size, 0.0);
  each_part(map, threads, [&](int64_t part) { sum(part, totals + part * size); });
  for (int64_t i = size; i < PARTS * size; ++i) totals[i % size] += totals[i];
}

// The mean of a few values of each channel, from all over the map. Sums are taken about it.
template <class T>
void guess_means(const Map& map, const T* x, float* guess) {
  constexpr int64_t COUNT = 16;
  for (int64_t c = 0; c < map.channels; ++c) {
    double sum = 0;
    for (int64_t i = 0; i < COUNT; ++i) {
      const int64_t row = map.rows() * (2 * i + 1) / (2 * COUNT), n = row / map.pixels, pixel = row % map.pixels;
      sum += widen(x[map.planar ? (n * map.channels + c) * map.pixels + pixel : row * map.channels + c]);
    }
    guess[c] = static_cast<float>(sum / COUNT);
  }
}

// Sums of d = x - guess and of its square are FP64 throughout: FP32 would lose digits of the variance wherever outliers
// put the guess, or a part of the map, far from the rest.
template <class T>
void sum_strip(const Map& map, const T* x, const float* guess, const Strip& s, double* totals) {
  Doubles about[2], first[2][2] = {}, second[2][2] = {};  // halves of a vector; even and odd ones
  in_doubles(spread(map, guess, s), about);
  along(s, [&](int64_t at, int lanes, int turn) {
    Doubles d[2];
    in_doubles(load_part(x + at, lanes), d);
    for (int half = 0; half < 2; ++half) {
      d[half] -= about[half];
      first[turn % 2][half] += d[half];
      second[turn % 2][half] += d[half] * d[half];
    }
  });
  double *to_first = totals + s.channel, *to_second = to_first + map.channels;
  for (int i = 0; i < s.lanes; ++i) {
    const int channel = map.planar ? 0 : i, half = i / DOUBLES, lane = i % DOUBLES;
    to_first[channel] += first[0][half][lane] + first[1][half][lane];
    to_second[channel] += second[0][half][lane] + second[1][half][lane];
  }
}

template <class T>
void statistics(const Map& map, const T* x, float* mean, float* variance, double* totals, int threads) {
  guess_means(map, x, mean);
  sum_parts(map, totals, threads, [&](int64_t part, double* own) {
    each_strip(map, part, [&](const Strip& s) { sum_strip(map, x, mean, s, own); });
  });
  const double count = static_cast<double>(map.rows());
  for (int64_t c = 0; c < map.channels; ++c) {
    const double offset = totals[c] / count, square = totals[map.channels + c] / count - offset * offset;
    mean[c] = static_cast<float>(mean[c] + offset);
    variance[c] = static_cast<float>(square < 0 ? 0 : square);
  }
}

// y = x scale + shift with scale = gamma / std and shift = beta - mean scale; one place, so that a forward pass,
// its recomputation and the mask of the backward pass agree to the last bit.
inline float scale_of(const float* gamma, const float* invstd, int64_t c) { return (gamma ? gamma[c] : 1) * invstd[c]; }
inline float shift_of(const float* beta, const float* mean, float scale, int64_t c) {
  return (beta ? beta[c] : 0) - mean[c] * scale;
}

template <class T>
void apply(const Map& map, const T* x, const float* scale, const float* shift, bool rectify, T* y, int threads) {
  each_part(map, threads, [&](int64_t part) {
    each_strip(map, part, [&](const Strip& s) {
      const Vector a = spread(map, scale, s), b = spread(map, shift, s), floor = broadcast(rectify ? 0 : -INFINITY);
      along(s, [&](int64_t at, int lanes, int) {
        const Vector z = load_part(x + at, lanes) * a + b;
        store_part(y + at, z < floor ? floor : z, lanes);
      });
    });
  });
}

struct Coefficients { float *scale, *shift, *slope, *constant; };

template <class T>
struct Backward {
  Map map;
  const T *grad, *x, *add;  // `add` may be null; `grad_x` may be `grad` or `x`, whose gaps it has
  const float *mean, *invstd;
  bool rectify;
  T* grad_x;
  Coefficients k;

  // The gradient behind the ReLU: passed where x scale + shift is not <= 0.
  Vector gradient(Vector g, Vector x_, Vector scale, Vector shift) const {
    return rectify ? (x_ * scale + shift <= 0.0f ? Vector{} : g) : g;
  }

  // Sums of dz and of dz (x - mean).
  void sum(int64_t part, double* totals) const {
    each_strip(map, part, [&](const Strip& s) {
      const Vector scale = spread(map, k.scale, s), shift = spread(map, k.shift, s), mu = spread(map, mean, s);
      Sums sums;
      along(s, [&](int64_t at, int lanes, int turn) {
        const Vector value = load_part(x + at + s.gaps, lanes);
        const Vector dz = gradient(load_part(grad + at, lanes), value, scale, shift);
        sums.first[turn] += dz;
        sums.second[turn] += dz * (value - mu);
      });
      sums.join(map, s, totals);
    });
  }

  // grad_x = scale (dz - mean(dz) - xhat mean(dz xhat)) = scale dz + slope (x - mean) + constant
  void finish(int64_t c, const double* totals, double count, float* grad_gamma, float* grad_beta) const {
    const double inv = invstd[c];
    grad_beta[c] = static_cast<float>(totals[c]);
    grad_gamma[c] = static_cast<float>(totals[map.channels + c] * inv);
    k.slope[c] = static_cast<float>(-k.scale[c] * inv * inv * totals[map.channels + c] / count);
    k.constant[c] = static_cast<float>(-k.scale[c] * totals[c] / count);
  }

  void apply(int64_t part) const {
    each_strip(map, part, [&](const Strip& s) {
      const Vector scale = spread(map, k.scale, s), shift = spread(map, k.shift, s), mu = spread(map, mean, s),
                   slope = spread(map, k.slope, s), constant = spread(map, k.constant, s);
      along(s, [&](int64_t at, int lanes, int) {
        const Vector value = load_part(x + at + s.gaps, lanes);
        const Vector dz = gradient(load_part(grad + at, lanes), value, scale, shift);
        const Vector sum = dz * scale + ((value - mu) * slope + constant);
        store_part(grad_x + at + s.gaps, add ? sum + load_part(add + at, lanes) : sum, lanes);
      });
    });
  }
};

// `sums`, where they are known, are the gradients of gamma and beta over `count` values of each channel, of which this
// map has a part.
template <class T>
void run(const Backward<T>& b, const float* sums, int64_t count, double* totals, float* grad_gamma, float* grad_beta,
         int threads) {
  const int64_t channels = b.map.channels;
  if (!sums) sum_parts(b.map, totals, threads, [&](int64_t part, double* own) { b.sum(part, own); });
  for (int64_t c = 0; c < channels; ++c) {
    if (sums) totals[channels + c] = sums[c] / static_cast<double>(b.invstd[c]), totals[c] = sums[channels + c];
    b.finish(c, totals, static_cast<double>(sums ? count : b.map.rows()), grad_gamma, grad_beta);
  }
  each_part(b.map, threads, [&](int64_t part) { b.apply(part); });
}

void fold(Address mean, Address invstd, Address gamma, Address beta, Address scale, Address shift, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) {
    at<float>(scale)[c] = scale_of(at<float>(gamma), at<float>(invstd), c);
    at<float>(shift)[c] = shift_of(at<float>(beta), at<float>(mean), at<float>(scale)[c], c);
  }
}

// invstd = 1 / sqrt(variance + eps); running += momentum (new - running), where there are running statistics, with the
// variance times `unbiased`.
template <class T>
void learn(const float* mean, const float* variance, int64_t channels, float momentum, float eps, float unbiased,
           T* running_mean, T* running_variance, float* invstd) {
  for (int64_t c = 0; c < channels; ++c) invstd[c] = 1 / std::sqrt(variance[c] + eps);
  if (!running_mean) return;
  const auto approach = [=](T* running, float now) {
    const float before = widen(*running);
    // From the nearer end, so that a momentum of 1 gives the new value itself.
    const float after = momentum < 0.5f ? before + momentum * (now - before) : now - (now - before) * (1 - momentum);
    store_part(running, broadcast(after), 1);
  };
  for (int64_t c = 0; c < channels; ++c) {
    approach(running_mean + c, mean[c]);
    approach(running_variance + c, variance[c] * unbiased);
  }
}
}  // namespace

// `planar` maps are [batch][channels][pixels], others [batch][pixels][channels].
static void batch_norm_statistics(Address x, int storage, int64_t batch, int64_t channels, int64_t pixels, bool planar,
                                  Address mean, Address variance, Address totals, int threads) {
  const Map map{batch, channels, pixels, planar};
  with_storage(storage, [&](auto type) {
    using T = decltype(type);
    statistics(map, at<T>(x), at<float>(mean), at<float>(variance), at<double>(totals), threads);
  });
}

static void batch_norm_apply(Address x, int storage, int64_t batch, int64_t channels, int64_t pixels, bool planar,
                             Address scale, Address shift, bool rectify, Address y, int threads) {
  const Map map{batch, channels, pixels, planar};
  with_storage(storage, [&](auto type) {
    using T = decltype(type);
    apply(map, at<T>(x), at<float>(scale), at<float>(shift), rectify, at<T>(y), threads);
  });
}

// `coefficients` is scratch for 4 x channels floats; gamma, beta, add and sums may be 0.
static void batch_norm_backward(Address grad, Address x, int storage, int64_t batch, int64_t channels, int64_t pixels,
                                bool planar, int64_t gap, Address mean, Address invstd, Address gamma, Address beta, bool rectify,
                                Address add, Address sums, int64_t count, Address grad_x, Address grad_gamma,
                                Address grad_beta, Address coefficients, Address totals, int threads) {
  const Map map{batch, channels, pixels, planar, gap};
  float* k = at<float>(coefficients);
  fold(mean, invstd, gamma, beta, coefficients, coefficients + channels * sizeof(float), channels);
  with_storage(storage, [&](auto type) {
    using T = decltype(type);
    const Backward<T> backward{map, at<T>(grad), at<T>(x), at<T>(add), at<float>(mean), at<float>(invstd), rectify,
                               at<T>(grad_x), {k, k + channels, k + 2 * channels, k + 3 * channels}};
    run(backward, at<float>(sums), count, at<double>(totals), at<float>(grad_gamma), at<float>(grad_beta), threads);
  });
}

static void batch_norm_learn(Address mean, Address variance, int64_t channels, double momentum, double eps,
                             double unbiased, Address running_mean, Address running_variance, int storage,
                             Address invstd) {
  with_storage(storage, [&](auto type) {
    using T = decltype(type);
    learn(at<float>(mean), at<float>(variance), channels, static_cast<float>(momentum), static_cast<float>(eps),
          static_cast<float>(unbiased), at<T>(running_mean), at<T>(running_variance), at<float>(invstd));
  });
}

void bind_norm(nb::module_& m) {
  m.def("batch_norm_learn", &batch_norm_learn, Release());
  m.def("batch_norm_statistics", &batch_norm_statistics, Release());
  m.def("batch_norm_fold", &fold, Release());
  m.def("batch_norm_apply", &batch_norm_apply, Release());
  m.def("batch_norm_backward", &batch_norm_backward, Release());
}
