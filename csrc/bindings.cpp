// The module: one line a kernel family.
#include "core.h"

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
void bind_quantise(nb::module_&);
void bind_windows(nb::module_&);

static bool supports_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

NB_MODULE(CORE_NAME, m) {
  m.def("supports_avx2", &supports_avx2);
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
  bind_quantise(m);
  bind_windows(m);
}
