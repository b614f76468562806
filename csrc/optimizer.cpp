// Updates of one tensor in place: each block of it is widened to FP32, updated, and narrowed again, so that the
// arithmetic is FP32 whatever the storage, and nothing of the tensor's size is needed beside it.
#include "core.h"
#include "moments.h"

namespace {

struct Block {
  alignas(64) float weight[BLOCK], gradient[BLOCK], first[BLOCK], second[BLOCK];
};

struct Tensors {
  Array weight, gradient, first, second;
  int64_t numel;
  bool write_weight, write_moments;

  bool is_large() const { return blocks() > 64; }  // smaller ones are done before another thread wakes up
  int64_t blocks() const { return (numel + BLOCK - 1) / BLOCK; }
  int64_t count(int64_t block) const { return std::min(BLOCK, numel - block * BLOCK); }

  void read(int64_t block, Block& b) const {
    widen(weight, block, count(block), b.weight);
    widen(gradient, block, count(block), b.gradient);
    widen(first, block, count(block), b.first);
    widen(second, block, count(block), b.second);
  }
};

// The gradient that counts: with the loss scale taken out and, unless it is decoupled, the weight decay added.
struct Gradient {
  float factor, weight_decay;
  float operator()(const Block& b, int64_t i) const { return factor * b.gradient[i] + weight_decay * b.weight[i]; }
};

struct Sgd {
  Gradient gradient;
  float lr, momentum;
  bool nesterov;

  void operator()(Block& b) const {
    const float ahead = nesterov ? momentum : 1, now = nesterov ? 1 : 0;
    for (int64_t i = 0; i < BLOCK; ++i) {
      const float g = gradient(b, i);
      b.first[i] = momentum * b.first[i] + g;
      b.weight[i] -= lr * (now * g + ahead * b.first[i]);
    }
  }
};

// `rooted`: the second moment is kept as its root, which takes half its range and is at hand.
struct Adam {
  Gradient gradient;
  float step, kept, gain1, beta2, gain2, eps, correction;  // gain = 1 - beta, which FP32 would not give
  bool rooted;

  void operator()(Block& b) const { rooted ? update<true>(b) : update<false>(b); }

  template <bool ROOTED>
  void update(Block& b) const {
    for (int64_t i = 0; i < BLOCK; ++i) {
      const float g = gradient(b, i), second = ROOTED ? b.second[i] * b.second[i] : b.second[i];
      const float square = beta2 * second + gain2 * (g * g), root = std::sqrt(square);
      b.first[i] += gain1 * (g - b.first[i]);
      b.second[i] = ROOTED ? root : square;
      b.weight[i] = kept * b.weight[i] - step * b.first[i] / (root * correction + eps);
    }
  }
};

// The power of two that brings a tensor's largest value just under 2^15: half of FP16's range.
float scale_for(float most) {
  if (most == 0 || !std::isfinite(most)) return most == 0 ? 1 : most;
  int exponent;
  std::frexp(most, &exponent);
  return std::ldexp(1.0f, std::max(exponent - 15, -126));
}

// The update is done once without being written, to learn the largest new values.
template <class Rule>
void choose_scales(Tensors& t, const Rule& rule, int threads) {
  int32_t first = 0, second = 0;
#pragma omp parallel for num_threads(threads) schedule(static) if (t.is_large()) reduction(max : first, second)
  for (int64_t block = 0; block < t.blocks(); ++block) {
    Block b;
    t.read(block, b);
    rule(b);
    first = std::max(first, bits_of<int32_t>(largest(b.first)));
    second = std::max(second, bits_of<int32_t>(largest(b.second)));
  }
  t.first.new_scale = scale_for(bits_of<float>(first));
  t.second.new_scale = scale_for(bits_of<float>(second));
}

template <class Rule>
void update(Tensors t, const Rule& rule, Words key, int threads) {
  const bool scaled = t.write_moments && (t.first.one_scale() || t.second.one_scale());
  if (scaled) choose_scales(t, rule, threads);
  const bool noisy_weight = t.weight.storage == BF16, noisy_second = t.second.data && t.second.storage != FP32;
#pragma omp parallel for num_threads(threads) schedule(static) if (t.is_large())
  for (int64_t block = 0; block < t.blocks(); ++block) {
    Block b;
    alignas(64) uint32_t noise[BLOCK];
    t.read(block, b);
    rule(b);
    if (t.write_weight) {
      if (noisy_weight) Noise{key, 0}.fill(block, noise);
      narrow(t.weight, block, t.count(block), b.weight, noisy_weight ? noise : nullptr);
    }
    if (t.write_moments) {
      if (noisy_second) Noise{key, 1}.fill(block, noise);
      narrow(t.first, block, t.count(block), b.first, nullptr);
      narrow(t.second, block, t.count(block), b.second, noisy_second ? noise : nullptr);
    }
  }
  if (scaled && t.first.one_scale()) *t.first.scales = t.first.new_scale;
  if (scaled && t.second.one_scale()) *t.second.scales = t.second.new_scale;
}

Array array(Address data, int storage, Address scales = 0) {
  Array a{at<void>(data), storage, at<float>(scales)};
  if (a.one_scale()) a.old_scale = a.new_scale = *a.scales;
  return a;
}

// A key for one update of one tensor.
Words key_of(int64_t seed, int64_t number, int64_t update_number) {
  const auto low = [](int64_t x) { return static_cast<uint32_t>(x); };
  return threefry({low(seed), low(seed >> 32)}, {low(number), low(update_number)});
}
}  // namespace

// SGD, or a part of it: without `write_weight` the gradient joins the momentum only; without a gradient the weight
// follows a momentum that is complete. `momentum` may be 0: then there is none.
static void sgd_update(Address weight, int weight_storage, Address gradient, int gradient_storage, Address momentum,
                       int momentum_storage, Address scales, int64_t numel, float lr, float mu, bool nesterov,
                       float weight_decay, float factor, bool write_weight, bool write_moments, int64_t seed,
                       int64_t number, int64_t update_number, int threads) {
  Tensors t{array(weight, weight_storage), array(gradient, gradient_storage),
            array(momentum, momentum_storage, scales), array(0, 0), numel, write_weight, write_moments};
  update(t, Sgd{{factor, weight_decay}, lr, mu, nesterov}, key_of(seed, number, update_number), threads);
}

static void adam_update(Address weight, int weight_storage, Address gradient, int gradient_storage, Address first,
                        int first_storage, Address first_scales, Address second, int second_storage,
                        Address second_scales, int64_t numel, double lr, double beta1, double beta2, double eps,
                        double weight_decay, bool decoupled, double factor, int64_t step, bool rooted, int64_t seed,
                        int64_t number, int64_t update_number, int threads) {
  Tensors t{array(weight, weight_storage), array(gradient, gradient_storage),
            array(first, first_storage, first_scales), array(second, second_storage, second_scales), numel, true, true};
  const double power = static_cast<double>(step);
  const auto f = [](double x) { return static_cast<float>(x); };
  const Adam rule{{f(factor), f(decoupled ? 0 : weight_decay)},
                  f(lr / (1 - std::pow(beta1, power))),
                  f(decoupled ? 1 - lr * weight_decay : 1),
                  f(1 - beta1),
                  f(beta2),
                  f(1 - beta2),
                  f(eps),
                  f(1 / std::sqrt(1 - std::pow(beta2, power))),
                  rooted};
  update(t, rule, key_of(seed, number, update_number), threads);
}

void bind_optimizer(nb::module_& m) {
  m.def("sgd_update", &sgd_update, Release());
  m.def("adam_update", &adam_update, Release());
}
