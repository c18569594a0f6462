// The kernels as plain C functions for the tests: dtype 0 is float32, 1 is bfloat16.
#pragma once
#include "attention.h"
#include "inferc_abi.h"
#include "int4.h"
#include "moe.h"
#include "quantize.h"
#include "sample.h"

using namespace inferc;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

template <class F>
void on(void* threads, F f) {
  parallel(threads, f);
}
template <class T>
Rows<T> rows_of(const void* data, i64 stride) {
  return {const_cast<T*>(static_cast<const T*>(data)), stride};
}
template <class T>
const T* as(const void* data) {
  return static_cast<const T*>(data);
}
// Runs a block with T as float or bf16; in float32 the library with emulated tiles would be that of avx512.
#ifdef INFERC_AMX_EMULATED
#define FOR_DTYPE(dtype, ...)      \
  {                                \
    if (dtype != 1) __builtin_trap(); \
    using T = bf16;                \
    __VA_ARGS__                    \
  }
#else
#define FOR_DTYPE(dtype, ...) \
  if (dtype == 1) {           \
    using T = bf16;           \
    __VA_ARGS__               \
  } else {                    \
    using T = float;          \
    __VA_ARGS__               \
  }
#endif

// The same, and with S as int8 or as T, for what stores K and V.
#define FOR_CACHE(dtype, int8, ...) \
  FOR_DTYPE(dtype, {                \
    if (int8) {                     \
      using S = i8;                 \
      __VA_ARGS__                   \
    } else {                        \
      using S = T;                  \
      __VA_ARGS__                   \
    }                               \
  })

}  // namespace
