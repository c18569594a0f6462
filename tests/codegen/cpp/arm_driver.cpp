// Calls the functions of a library for AArch64, under an emulator, as it is told over a pipe; what they work on lies in a file
// that the test has mapped too. arm.py has the other side.
// Integers and addresses go into x0 to x7 and then onto the stack, floats into s0 to s7, so that one type of function does
// for all that a test calls.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <utility>

using i64 = int64_t;

namespace {

constexpr size_t INTS = 32, FLOATS = 8, REGISTERS = 8;

struct Call {
  i64 function, returns_double, ints[INTS];
  float floats[FLOATS];
};

template <class T, size_t>
using Each = T;

template <class R, size_t... I, size_t... F, size_t... S>
R run(const Call& c, std::index_sequence<I...>, std::index_sequence<F...>, std::index_sequence<S...>) {
  using Function = R (*)(Each<i64, I>..., Each<float, F>..., Each<i64, S>...);
  return reinterpret_cast<Function>(c.function)(c.ints[I]..., c.floats[F]..., c.ints[REGISTERS + S]...);
}
template <class R>
R run(const Call& c) {
  return run<R>(c, std::make_index_sequence<REGISTERS>(), std::make_index_sequence<FLOATS>(),
                std::make_index_sequence<INTS - REGISTERS>());
}

void take(void* to, size_t size) {
  if (fread(to, 1, size, stdin) != size) _Exit(0);  // the test is over
}
void give(const void* from, size_t size) {
  fwrite(from, 1, size, stdout);
  fflush(stdout);
}

}  // namespace

extern "C" {

// What `record` is to keep: the rows of one node, one behind the other.
struct Record {
  i64 node, row_bytes;
  char* to;
};

// An observer of steps (InfercHost).
void record(void* context, int32_t node, int32_t, const void* data, i64 rows, i64 stride) {
  Record* r = static_cast<Record*>(context);
  if (node != r->node) return;
  for (i64 row = 0; row < rows; ++row, r->to += r->row_bytes)
    memcpy(r->to, static_cast<const char*>(data) + row * stride, size_t(r->row_bytes));
}
}

// The library, the file's descriptor and its size.
int main(int, char** argv) {
  void* memory = mmap(nullptr, size_t(atol(argv[3])), PROT_READ | PROT_WRITE, MAP_SHARED, atoi(argv[2]), 0);
  if (memory == MAP_FAILED || !dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL)) {
    fprintf(stderr, "%s\n", memory == MAP_FAILED ? "cannot map the file" : dlerror());
    return 1;
  }
  give(&memory, sizeof memory);
  for (;;) {
    i64 length;  // of a name to look up, or 0 for a call
    take(&length, sizeof length);
    if (length) {
      char name[64] = {};
      take(name, size_t(length));
      void* found = dlsym(RTLD_DEFAULT, name);
      give(&found, sizeof found);
    } else {
      Call call;
      take(&call, sizeof call);
      i64 result;
      if (call.returns_double) {
        const double value = run<double>(call);
        memcpy(&result, &value, sizeof result);
      } else {
        result = run<i64>(call);
      }
      give(&result, sizeof result);
    }
  }
}
