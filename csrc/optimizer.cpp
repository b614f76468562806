// Updates of one tensor in place: each block of it is widened to FP32, updated, and narrowed again, so that the
// arithmetic is FP32 whatever the storage, and nothing of the tensor's size is needed beside it. Moments are widened
// and narrowed in registers, by code of its own for each storage; weights and gradients that are not FP32 in a Room.
#include "core.h"
#include "moments.h"

namespace {

struct Room {
  alignas(64) float weight[BLOCK], gradient[BLOCK], first[BLOCK], second[BLOCK];
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

// LANES elements of each tensor.
struct Values { Vector weight, gradient, first, second; };

// The gradient that counts: with the loss scale taken out and, unless it is decoupled, the weight decay added.
struct Gradient {
  float factor, weight_decay;
  Vector operator()(const Values& v) const { return factor * v.gradient + weight_decay * v.weight; }
};

struct Sgd {
  Gradient gradient;
  float lr, momentum;
  bool nesterov;

  void operator()(Values& v) const {
    const float ahead = nesterov ? momentum : 1, now = nesterov ? 1 : 0;
    const Vector g = gradient(v);
    v.first = momentum * v.first + g;
    v.weight -= lr * (now * g + ahead * v.first);
  }
};

// ROOTED: the second moment is kept as its root, which takes half its range and is at hand.
template <bool ROOTED>
struct Adam {
  Gradient gradient;
  float step, kept, gain1, beta2, gain2, eps, correction;  // gain = 1 - beta, which FP32 would not give

  void operator()(Values& v) const {
    const Vector g = gradient(v), square = ROOTED ? v.second * v.second : v.second;
    v.first += gain1 * (g - v.first);
    v.second = beta2 * square + gain2 * (g * g);
    const Vector root = square_root(v.second);
    v.weight = kept * v.weight - step * v.first / (root * correction + eps);
    if (ROOTED) v.second = root;
  }
};

// Which moment is rounded by chance.
enum Chance { NEITHER, FIRST, SECOND };

// The rule is a copy: the compiler need not fear that a store changes its numbers.
template <class First, class Second, Chance CHANCE, class Rule>
void update_block(const Tensors& t, const Rule rule, Words key, int64_t number) {
  constexpr bool BY_CHANCE = CHANCE != NEITHER, LATER = Moment<First, false>::WAITS;
  Room room;
  const float *weight = widen(t.weight, room.weight), *gradient = widen(t.gradient, room.gradient);
  const bool in_place = t.write_weight && t.weight.storage == FP32;
  float* new_weight = in_place ? static_cast<float*>(t.weight.data) : room.weight;
  Moment<First, CHANCE == FIRST> first(t.first, room.first, t.write_moments);
  Moment<Second, CHANCE == SECOND> second(t.second, room.second, t.write_moments);
  const Noise noise{key, CHANCE == FIRST ? 2u : 1u, number};
  each_vector<BY_CHANCE && !LATER>(noise, [&](int64_t i, BitVector random) {
    Values v{load(weight + i), load(gradient + i), first.read(i), second.read(i)};
    rule(v);
    store(new_weight + i, v.weight);
    first.write(i, v.first, random);
    second.write(i, v.second, random);
  });
  if (t.write_weight) narrow(t.weight, new_weight, Noise{key, 0, number});
  if constexpr (LATER) {
    if (!t.write_moments) return;
    first.choose_scale();
    second.choose_scale();
    each_vector<BY_CHANCE>(noise, [&](int64_t i, BitVector random) {
      first.put(i, random);
      second.put(i, random);
    });
  }
}

template <class First, class Second, Chance CHANCE, class Rule>
void update(const Tensors& t, const Rule& rule, Words key, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (t.is_large())
  for (int64_t number = 0; number < t.blocks(); ++number)
    with_block(t, number, [&](const Tensors& block) {
      update_block<First, Second, CHANCE>(block, rule, key, number);
    });
}

Array array(Address data, int storage, Address scales = 0) {
  return {at<void>(data), storage, at<float>(scales)};
}

// body(first, second): the storage of both moments, by that of the first.
template <class Body>
void with_form(int first_storage, Body body) {
  switch (first_storage) {
    case FP32: return body(float{}, float{});
    case FP16: return body(Half{}, Half{});
    case BF16: return body(Bfloat{}, Bfloat{});
    default: return body(Signed{}, Unsigned{});
  }
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
  const Sgd rule{{factor, weight_decay}, lr, mu, nesterov};
  const Words key = key_of(seed, number, update_number);
  if (!momentum) return update<None, None, NEITHER>(t, rule, key, threads);
  with_form(momentum_storage, [&](auto first, auto) {
    using First = decltype(first);
    if (by_chance) update<First, None, FIRST>(t, rule, key, threads);
    else update<First, None, NEITHER>(t, rule, key, threads);
  });
}

static void adam_update(Address weight, int weight_storage, Address gradient, int gradient_storage,
                        Address gradient_scales, Address first, int first_storage, Address first_scales, Address second,
                        int second_storage, Address second_scales, int64_t numel, double lr, double beta1, double beta2, double eps,
                        double weight_decay, bool decoupled, double factor, int64_t step, int64_t seed,
                        int64_t number, int64_t update_number, int threads) {
  Tensors t{array(weight, weight_storage), array(gradient, gradient_storage, gradient_scales),
            array(first, first_storage, first_scales), array(second, second_storage, second_scales), numel, true, true};
  const double power = static_cast<double>(step);
  const auto f = [](double x) { return static_cast<float>(x); };
  with_form(first_storage, [&](auto first_type, auto second_type) {
    using First = decltype(first_type);
    using Second = decltype(second_type);
    const Adam<std::is_same_v<Second, Half> || std::is_same_v<Second, Unsigned>> rule{
        {f(factor), f(decoupled ? 0 : weight_decay)},
        f(lr / (1 - std::pow(beta1, power))),
        f(decoupled ? 1 - lr * weight_decay : 1),
        f(1 - beta1),
        f(beta2),
        f(1 - beta2),
        f(eps),
        f(1 / std::sqrt(1 - std::pow(beta2, power)))};
    constexpr Chance CHANCE = sizeof(Second) < sizeof(float) ? SECOND : NEITHER;
    update<First, Second, CHANCE>(t, rule, key_of(seed, number, update_number), threads);
  });
}

// The bits that round elements by chance, 16 for each, from the first of a block on.
static void random_bits(Address bits, int64_t numel, int64_t first_block, int stream, int64_t seed, int64_t number,
                        int64_t update_number) {
  uint32_t block[BLOCK];
  for (int64_t begin = 0; begin < numel; begin += BLOCK) {
    const Noise noise{key_of(seed, number, update_number), static_cast<uint32_t>(stream), first_block + begin / BLOCK};
    each_vector<true>(noise, [&](int64_t i, BitVector random) { std::memcpy(block + i, &random, sizeof random); });
    std::memcpy(at<uint32_t>(bits) + begin, block, std::min(BLOCK, numel - begin) * sizeof *block);
  }
}

void bind_optimizer(nb::module_& m) {
  m.def("random_bits", &random_bits, Release());
  m.def("sgd_update", &sgd_update, Release());
  m.def("adam_update", &adam_update, Release());
}
