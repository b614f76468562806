// FP64 sums of FP32 vectors.
#pragma once
#include "vector.h"

typedef float Four __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(32)));

inline void in_doubles(Vector v, Doubles (&halves)[2]) {
  Four floats[2];
  std::memcpy(floats, &v, sizeof v);
  for (int half = 0; half < 2; ++half) halves[half] = __builtin_convertvector(floats[half], Doubles);
}
