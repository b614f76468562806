// Dynamic convolution: each position and head has its own kernel, of size K, over the positions around it.
//   out[t] = sum over k of kernels[t, k] x[t + k - left], x being zero outside its sequence
// Maps are [batch][length][heads][channels], kernels [batch][length][heads][K]. Nothing is unfolded and there is no
// scratch: a position's window is read where it lies, and sums are FP32 in registers.
#include <algorithm>

#include "core.h"
#include "vector.h"

namespace {

constexpr int HELD = 8;  // vectors of a head's channels whose sums are kept in registers

struct Shape {
  int64_t batch, length, heads, channels, size, left;
  int64_t steps() const { return batch * length * heads * channels * size / LANES; }
  int64_t place(int64_t position, int64_t head) const { return position * heads + head; }
};

// The taps of position t within its sequence: those with 0 <= t + direction (k - left) < length.
struct Taps { int64_t first, last; };
inline Taps taps(const Shape& s, int64_t t, int direction) {
  const int64_t before = direction > 0 ? t : s.length - 1 - t, after = s.length - 1 - before;
  return {std::max<int64_t>(0, s.left - before), std::min(s.size, s.left + after + 1)};
}

// Sums of eight vectors (or fewer) of channels: out[t] = sum of weight(k) times the source at t + direction (k - left).
// In the forward pass the weights are t's own kernel; in the gradient of x they are the readers' kernels.
template <class T>
void sum_window(const Shape& s, const T* source, const T* kernels, int64_t sequence, int64_t t, int64_t head,
                int direction, T* out) {
  const Taps range = taps(s, t, direction);
  for (int64_t c = 0; c < s.channels; c += HELD * LANES) {
    const int64_t count = std::min<int64_t>(HELD * LANES, s.channels - c);
    Vector sum[HELD] = {};
    for (int64_t k = range.first; k < range.last; ++k) {
      const int64_t at = sequence + t + direction * (k - s.left), reader = direction > 0 ? sequence + t : at;
      const float weight = widen(kernels[s.place(reader, head) * s.size + k]);
      const T* from = source + s.place(at, head) * s.channels + c;
      if (count == HELD * LANES)
        for (int v = 0; v < HELD; ++v) sum[v] += weight * load(from + v * LANES);
      else
        for (int64_t i = 0; i < count; i += LANES)
          sum[i / LANES] += weight * load_part(from + i, static_cast<int>(std::min<int64_t>(LANES, count - i)));
    }
    T* to = out + s.place(sequence + t, head) * s.channels + c;
    for (int64_t i = 0; i < count; i += LANES)
      store_part(to + i, sum[i / LANES], static_cast<int>(std::min<int64_t>(LANES, count - i)));
  }
}

template <class T>
float dot(const T* a, const T* b, int64_t count) {
  Vector sum[2] = {};
  int64_t i = 0;
  for (; i + 2 * LANES <= count; i += 2 * LANES)
    for (int v = 0; v < 2; ++v) sum[v] += load(a + i + v * LANES) * load(b + i + v * LANES);
  for (; i < count; i += LANES) {
    const int lanes = static_cast<int>(std::min<int64_t>(LANES, count - i));
    sum[0] += load_part(a + i, lanes) * load_part(b + i, lanes);
  }
  return sum_lanes(sum[0] + sum[1]);
}

// The gradient of one kernel: grad_kernels[t, k] = grad_y[t] . x[t + k - left]; zero where x is.
template <class T>
void kernel_gradient(const Shape& s, const T* grad, const T* x, int64_t sequence, int64_t t, int64_t head, T* out) {
  const Taps range = taps(s, t, 1);
  const T* here = grad + s.place(sequence + t, head) * s.channels;
  for (int64_t first = 0; first < s.size; first += LANES) {
    const int lanes = static_cast<int>(std::min<int64_t>(LANES, s.size - first));
    Vector gradient = {};
    for (int i = 0; i < lanes; ++i) {
      const int64_t k = first + i;
      if (k >= range.first && k < range.last)
        gradient[i] = dot(here, x + s.place(sequence + t + k - s.left, head) * s.channels, s.channels);
    }
    store_part(out + s.place(sequence + t, head) * s.size + first, gradient, lanes);
  }
}

// Calls body(first position of the sequence, position, head) for each position and head.
template <class F>
void each_position(const Shape& s, int threads, F body) {
#pragma omp parallel for num_threads(team(threads, s.steps()))
  for (int64_t position = 0; position < s.batch * s.length; ++position)
    for (int64_t head = 0; head < s.heads; ++head)
      body(position / s.length * s.length, position % s.length, head);
}
}  // namespace

// direction 1: out from x. direction -1: the gradient of x from that of out.
static void dynamic_convolution(Address source, Address kernels, Address out, int storage, int64_t batch,
                                int64_t length, int64_t heads, int64_t channels, int64_t size, int64_t left,
                                int direction, int threads) {
  const Shape s{batch, length, heads, channels, size, left};
  with_storage(storage, [&](auto type) {
    using T = decltype(type);
    each_position(s, threads, [&](int64_t sequence, int64_t t, int64_t head) {
      sum_window(s, at<T>(source), at<T>(kernels), sequence, t, head, direction, at<T>(out));
    });
  });
}

static void dynamic_convolution_kernel_gradient(Address grad, Address x, Address out, int storage, int64_t batch,
                                                int64_t length, int64_t heads, int64_t channels, int64_t size,
                                                int64_t left, int threads) {
  const Shape s{batch, length, heads, channels, size, left};
  with_storage(storage, [&](auto type) {
    using T = decltype(type);
    each_position(s, threads, [&](int64_t sequence, int64_t t, int64_t head) {
      kernel_gradient(s, at<T>(grad), at<T>(x), sequence, t, head, at<T>(out));
    });
  });
}

void bind_dynamic_convolution(nb::module_& m) {
  m.def("dynamic_convolution", &dynamic_convolution, Release());
  m.def("dynamic_convolution_kernel_gradient", &dynamic_convolution_kernel_gradient, Release());
}
