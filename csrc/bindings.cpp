// The module: one line a kernel family.
#include <nanobind/stl/string.h>

#include "core.h"

void bind_allocations(nb::module_&);
void bind_bitmask(nb::module_&);
void bind_gradients(nb::module_&);
void bind_norm(nb::module_&);
void bind_optimizer(nb::module_&);
void bind_sparse_index(nb::module_&);
void bind_sparse_conv(nb::module_&);
void bind_sparse_linear(nb::module_&);
void bind_sparse_embedding(nb::module_&);
void bind_conv(nb::module_&);
void bind_conv_weight(nb::module_&);
void bind_dynamic_convolution(nb::module_&);
void bind_pooling(nb::module_&);
void bind_pooling_weight(nb::module_&);
void bind_quantise(nb::module_&);
void bind_tape(nb::module_&);
void bind_windows(nb::module_&);

// Whether this CPU, and its operating system, run what the core of this name is compiled for.
static bool supports(const std::string& core) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (core == "avx2" || core == "lanes16") return avx2;
  if (core == "avx512")
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
  return core == "generic";
}

NB_MODULE(CORE_NAME, m) {
  m.attr("lanes") = CORE_LANES;
  m.def("supports", &supports);
  bind_allocations(m);
  bind_bitmask(m);
  bind_gradients(m);
  bind_norm(m);
  bind_optimizer(m);
  bind_sparse_index(m);
  bind_sparse_conv(m);
  bind_sparse_linear(m);
  bind_sparse_embedding(m);
  bind_conv(m);
  bind_conv_weight(m);
  bind_dynamic_convolution(m);
  bind_pooling(m);
  bind_pooling_weight(m);
  bind_quantise(m);
  bind_tape(m);
  bind_windows(m);
}
