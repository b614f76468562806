// FP64 sums of FP32 vectors.
#pragma once
#include "vector.h"

typedef float HalfFloats __attribute__((vector_size(2 * LANES)));
typedef double Doubles __attribute__((vector_size(4 * LANES)));  // half as many as there are floats in a vector
constexpr int DOUBLES = LANES / 2;

inline void in_doubles(Vector v, Doubles (&halves)[2]) {
  HalfFloats floats[2];
  std::memcpy(floats, &v, sizeof v);
  for (int half = 0; half < 2; ++half) halves[half] = __builtin_convertvector(floats[half], Doubles);
}
