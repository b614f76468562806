// Updates of one tensor in place: each block of it is widened to FP32, updated, and narrowed again, so that the
// arithmetic is FP32 whatever the storage, and nothing of the tensor's size is needed beside it.
#include "core.h"
#include "moments.h"

namespace {

struct Room {
  alignas(64) float weight[BLOCK], gradient[BLOCK], first[BLOCK], second[BLOCK];
};

// A block in FP32: where it is in memory, or in a Room.
struct Block {
  float* weight;
  const float* gradient;
  float *first, *second;
};

struct Tensors {
  Array weight, gradient, first, second;
  int64_t numel;
  bool write_weight, write_moments;

  bool is_large() const { return blocks() > 64; }  // smaller ones are done before another thread wakes up
  int64_t blocks() const { return (numel + BLOCK - 1) / BLOCK; }

  Tensors block(int64_t number) const {
    Tensors one = *this;
    one.weight = weight.block(number), one.gradient = gradient.block(number);
    one.first = first.block(number), one.second = second.block(number);
    one.numel = std::min(BLOCK, numel - number * BLOCK);
    return one;
  }

  // Of one block: values that are only looked at are read where they are; those that change too if they are kept.
  Block open(Room& room, bool changes) const {
    const auto opened = [](const Array& array, float* own, bool kept) {
      const float* values = widen(array, own);
      if (values != own && !kept) std::copy(values, values + BLOCK, own), values = own;
      return const_cast<float*>(values);
    };
    const bool weights = write_weight || !changes, moments = write_moments || !changes;
    return {opened(weight, room.weight, weights), widen(gradient, room.gradient), opened(first, room.first, moments),
            opened(second, room.second, moments)};
  }
};

// body(block): whole blocks where they are, and a last one that is shorter in a copy, filled up with zeros.
template <class Body>
void with_block(const Tensors& t, int64_t number, Body body) {
  Tensors block = t.block(number);
  if (block.numel == BLOCK) return body(block);
  Array* arrays[] = {&block.weight, &block.gradient, &block.first, &block.second};
  alignas(64) uint8_t copies[4][BLOCK * sizeof(float)] = {};
  void* places[4];
  for (int i = 0; i < 4; ++i) {
    places[i] = arrays[i]->data;
    if (!places[i]) continue;
    std::memcpy(copies[i], places[i], arrays[i]->bytes(block.numel));
    arrays[i]->data = copies[i];
  }
  body(block);
  for (int i = 0; i < 4; ++i)
    if (places[i] && i != 1) std::memcpy(places[i], copies[i], arrays[i]->bytes(block.numel));
}

// The gradient that counts: with the loss scale taken out and, unless it is decoupled, the weight decay added.
struct Gradient {
  float factor, weight_decay;
  Vector operator()(const Block& b, int64_t i) const {
    return factor * load(b.gradient + i) + weight_decay * load(b.weight + i);
  }
};

// The moments of LANES elements after an update.
struct Moments { Vector first, second; };

struct Sgd {
  Gradient gradient;
  float lr, momentum;
  bool nesterov;

  Moments moments(const Block& b, int64_t i, Vector g) const { return {momentum * load(b.first + i) + g, Vector{}}; }

  void operator()(const Block& b) const {
    const float ahead = nesterov ? momentum : 1, now = nesterov ? 1 : 0;
    for (int64_t i = 0; i < BLOCK; i += LANES) {
      const Vector g = gradient(b, i), first = moments(b, i, g).first;
      store(b.weight + i, load(b.weight + i) - lr * (now * g + ahead * first));
      store(b.first + i, first);
    }
  }
};

// ROOTED: the second moment is kept as its root, which takes half its range and is at hand.
template <bool ROOTED>
struct Adam {
  Gradient gradient;
  float step, kept, gain1, beta2, gain2, eps, correction;  // gain = 1 - beta, which FP32 would not give

  Moments moments(const Block& b, int64_t i, Vector g) const {  // the second as its square
    const Vector first = load(b.first + i), second = load(b.second + i);
    return {first + gain1 * (g - first), beta2 * (ROOTED ? second * second : second) + gain2 * (g * g)};
  }

  void operator()(const Block& b) const {
    for (int64_t i = 0; i < BLOCK; i += LANES) {
      const Moments m = moments(b, i, gradient(b, i));
      const Vector root = square_root(m.second);
      store(b.weight + i, kept * load(b.weight + i) - step * m.first / (root * correction + eps));
      store(b.first + i, m.first);
      store(b.second + i, ROOTED ? root : m.second);
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

// The largest magnitudes, as bits: they are ordered as those are, NaN above all.
struct Peaks { IntVector first{}, second{}; };

// The moments are updated once without being written, to learn the largest new values. A root is largest where its
// square is.
template <class Rule>
void choose_scales(Tensors& t, const Rule& rule, bool rooted, int threads) {
  int32_t first = 0, second = 0;
#pragma omp parallel for num_threads(threads) schedule(static) if (t.is_large()) reduction(max : first, second)
  for (int64_t number = 0; number < t.blocks(); ++number) {
    Peaks peaks;
    with_block(t, number, [&](const Tensors& block) {
      Room room;
      const Block b = block.open(room, false);
      for (int64_t i = 0; i < BLOCK; i += LANES) {
        const Moments m = rule.moments(b, i, rule.gradient(b, i));
        const IntVector bits[2] = {bits_of<IntVector>(m.first) & 0x7fffffff, bits_of<IntVector>(m.second) & 0x7fffffff};
        peaks.first = bits[0] > peaks.first ? bits[0] : peaks.first;
        peaks.second = bits[1] > peaks.second ? bits[1] : peaks.second;
      }
    });
    for (int i = 0; i < LANES; ++i)
      first = std::max(first, peaks.first[i]), second = std::max(second, peaks.second[i]);
  }
  const float most = bits_of<float>(second);
  t.first.new_scale = scale_for(bits_of<float>(first));
  t.second.new_scale = scale_for(rooted ? std::sqrt(most) : most);
}

template <class Rule>
void update(Tensors t, const Rule& rule, bool rooted, bool noisy_first, Words key, int threads) {
  const bool scaled = t.write_moments && (t.first.one_scale() || t.second.one_scale());
  if (scaled) choose_scales(t, rule, rooted, threads);
  const bool noisy_weight = t.weight.storage == BF16, noisy_second = t.second.data && t.second.storage != FP32;
#pragma omp parallel for num_threads(threads) schedule(static) if (t.is_large())
  for (int64_t number = 0; number < t.blocks(); ++number)
    with_block(t, number, [&](const Tensors& block) {
      Room room;
      alignas(64) uint32_t noise[BLOCK];
      const Block b = block.open(room, true);
      rule(b);
      if (t.write_weight) {
        if (noisy_weight) Noise{key, 0}.fill(number, noise);
        narrow(block.weight, b.weight, noisy_weight ? noise : nullptr);
      }
      if (t.write_moments) {
        if (noisy_first) Noise{key, 2}.fill(number, noise);
        narrow(block.first, b.first, noisy_first ? noise : nullptr);
        if (noisy_second) Noise{key, 1}.fill(number, noise);
        narrow(block.second, b.second, noisy_second ? noise : nullptr);
      }
    });
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
// follows a momentum that is complete. `momentum` may be 0: then there is none. `by_chance`: the momentum is rounded so.
static void sgd_update(Address weight, int weight_storage, Address gradient, int gradient_storage,
                       Address gradient_scales, Address momentum, int momentum_storage, Address scales, int64_t numel,
                       float lr, float mu, bool nesterov, float weight_decay, float factor, bool write_weight,
                       bool write_moments, bool by_chance, int64_t seed, int64_t number, int64_t update_number,
                       int threads) {
  Tensors t{array(weight, weight_storage), array(gradient, gradient_storage, gradient_scales),
            array(momentum, momentum_storage, scales), array(0, 0), numel, write_weight, write_moments};
  update(t, Sgd{{factor, weight_decay}, lr, mu, nesterov}, false, by_chance, key_of(seed, number, update_number), threads);
}

static void adam_update(Address weight, int weight_storage, Address gradient, int gradient_storage,
                        Address gradient_scales, Address first, int first_storage, Address first_scales, Address second,
                        int second_storage, Address second_scales, int64_t numel, double lr, double beta1, double beta2, double eps,
                        double weight_decay, bool decoupled, double factor, int64_t step, bool rooted, int64_t seed,
                        int64_t number, int64_t update_number, int threads) {
  Tensors t{array(weight, weight_storage), array(gradient, gradient_storage, gradient_scales),
            array(first, first_storage, first_scales), array(second, second_storage, second_scales), numel, true, true};
  const double power = static_cast<double>(step);
  const auto f = [](double x) { return static_cast<float>(x); };
  const auto run = [&](auto is_rooted) {
    const Adam<decltype(is_rooted)::value> rule{{f(factor), f(decoupled ? 0 : weight_decay)},
                                                f(lr / (1 - std::pow(beta1, power))),
                                                f(decoupled ? 1 - lr * weight_decay : 1),
                                                f(1 - beta1),
                                                f(beta2),
                                                f(1 - beta2),
                                                f(eps),
                                                f(1 / std::sqrt(1 - std::pow(beta2, power)))};
    update(t, rule, is_rooted, false, key_of(seed, number, update_number), threads);
  };
  rooted ? run(std::true_type{}) : run(std::false_type{});
}

// The bits that round elements by chance, 16 for each, from the first of a block on.
static void random_bits(Address bits, int64_t numel, int64_t first_block, int stream, int64_t seed, int64_t number,
                        int64_t update_number) {
  const Noise noise{key_of(seed, number, update_number), static_cast<uint32_t>(stream)};
  uint32_t block[BLOCK];
  for (int64_t begin = 0; begin < numel; begin += BLOCK) {
    noise.fill(first_block + begin / BLOCK, block);
    std::memcpy(at<uint32_t>(bits) + begin, block, std::min(BLOCK, numel - begin) * sizeof *block);
  }
}

void bind_optimizer(nb::module_& m) {
  m.def("random_bits", &random_bits, Release());
  m.def("sgd_update", &sgd_update, Release());
  m.def("adam_update", &adam_update, Release());
}
