// What every kernel family shares: the pointer type of the bindings and the loop that spreads work over threads.
// Kernels know pointers and sizes only. Python checks shapes, dtypes and contiguity before it calls (kernels/).
#pragma once
#include <nanobind/nanobind.h>
#include <omp.h>

#include <cstdint>

namespace nb = nanobind;
using Address = std::uintptr_t;  // tensor.data_ptr()

template <class T>
inline T* at(Address address) { return reinterpret_cast<T*>(address); }

inline int64_t divide_down(int64_t a, int64_t b) { return a / b - (a % b < 0); }
inline int64_t modulo(int64_t a, int64_t b) { return a - divide_down(a, b) * b; }
inline int64_t divide_up(int64_t a, int64_t b) { return -divide_down(-a, b); }

// The threads that some work deserves: below about 20 microseconds, waking them costs more than they save.
inline int team(int threads, int64_t steps) { return steps < 1 << 15 ? 1 : threads; }

// Every family adds its functions to the module; bindings.cpp calls them all.
using Release = nb::call_guard<nb::gil_scoped_release>;
