"""Measure the speed of the CPU kernels beside the memory bandwidth of the same run.

    python benchmarks/kernels_cpu.py [--threads N] [--isa ISA] [--seconds S] [--only bf16 …]
                                    [--experts] [--sample] [--attention] [--json]

Weights rotate through more memory than the caches hold. A product with few rows should read its weight at the bandwidth
of the memory probe; one with many rows should reach the arithmetic limit. Every number is the best of several rounds. A
layer of experts is measured in turn with the probe: `of_probe` is its bandwidth as a share of the probe's just before
it, as a median. Sampling is measured in turn with reading the logits: `reads` is how many times as long it takes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferc.codegen.cpp.build import ISAS, Unit, build
from inferc.codegen.cpp.emit import sample_row_bytes
from inferc.codegen.cpp.unit import HEADERS
from inferc.manifest import align
from inferc.runtime.runners.cpu import abi
from inferc.runtime.runners.cpu.abi import choose_isa
from inferc.runtime.step.plan import SampleRows
from inferc.system.resources import available_cores

SOURCE = r"""
#include "attention.h"
#include "int4.h"
#include "moe.h"
#include "sample.h"
using namespace inferc;
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT void* bench_open(int count) { return open_pool(count); }
EXPORT void bench_close(void* pool) { close_pool(static_cast<Pool*>(pool)); }
EXPORT void bench_read(void* pool, const float* data, i64 count, float* sink) {
  auto region = [&](Team& t) {
    Vec a = zero(), b = zero(), c = zero(), d = zero();
    t.each(count, 1 << 16, [&](i64 begin, i64 end) {
      for (i64 i = begin; i < end; i += 4 * LANES) {
        a = max(a, load(data + i));
        b = max(b, load(data + i + LANES));
        c = max(c, load(data + i + 2 * LANES));
        d = max(d, load(data + i + 3 * LANES));
      }
    });
    sink[t.tid] = maximum(max(max(a, b), max(c, d)));
  };
  parallel(pool, region);
}
template <class T>
void bench_linear(void* pool, const void* x, i64 rows, const void* w, i64 n, i64 k, void* out) {
  auto region = [&](Team& t) {
    linear<T, T>(t, Rows<const T>{static_cast<const T*>(x), k}, rows, Panels<T>{static_cast<const T*>(w), n, k},
                 nullptr, Rows<T>{static_cast<T*>(out), n});
  };
  parallel(pool, region);
}
EXPORT void bench_linear_bf16(void* pool, const void* x, i64 rows, const void* w, i64 n, i64 k, void* out) {
  bench_linear<bf16>(pool, x, rows, w, n, k, out);
}
EXPORT void bench_linear_f32(void* pool, const void* x, i64 rows, const void* w, i64 n, i64 k, void* out) {
  bench_linear<float>(pool, x, rows, w, n, k, out);
}
EXPORT void bench_linear_int8(void* pool, const void* x, i64 rows, const void* w, i64 n, i64 k, void* out) {
  auto region = [&](Team& t) {
    Panels<i8> panels{static_cast<const i8*>(w), n, k};
    linear_int8<bf16>(t, Rows<const bf16>{static_cast<const bf16*>(x), k}, rows, panels, nullptr, nullptr,
                      Written<bf16>{{}, {static_cast<bf16*>(out), n}});
  };
  parallel(pool, region);
}
EXPORT void bench_linear_w8a8(void* pool, const void* x, i64 rows, const void* w, i64 n, i64 k, void* out) {
  auto region = [&](Team& t) {
    Panels<i8> panels{static_cast<const i8*>(w), n, k};
    linear_w8a8<bf16>(t, Rows<const i8>{static_cast<const i8*>(x), k},
                      Rows<const float>{static_cast<const float*>(x), 0}, rows,
                      panels, nullptr, nullptr, Written<bf16>{{}, {static_cast<bf16*>(out), n}});
  };
  parallel(pool, region);
}
// The scales, one per group of 32, come after the integers.
EXPORT void bench_linear_w4a8(void* pool, const void* x, i64 rows, const void* w, i64 n, i64 k, void* out) {
  auto region = [&](Team& t) {
    const u8* data = static_cast<const u8*>(w);
    Int4Panels panels{data, reinterpret_cast<const i8*>(data + n * k / 2), n, k, 32};
    linear_w4a8<bf16>(t, Rows<const i8>{static_cast<const i8*>(x), k},
                      Rows<const float>{static_cast<const float*>(x), 0}, rows,
                      panels, nullptr, nullptr, Written<bf16>{{}, {static_cast<bf16*>(out), n}});
  };
  parallel(pool, region);
}
// Runs one layer after the other, each with its own experts: first gate_up, then down, of all experts. With four bits
// the integers come before their scales. `scale` serves as all other scales and weights.
template <class W, class X>
void bench_experts(void* pool, const void* x, const i32* ids, const float* scale, i64 rows, i64 top_k, i64 layers,
                   const char* w, i64 experts, i64 hidden, i64 inter, void* out, char* work) {
  using Matrix = ExpertMatrix<bf16, W>;
  auto region = [&](Team& t) {
    const char* at = w;
    auto next = [&](i64 n, i64 k) {
      Matrix made{reinterpret_cast<const W*>(at), nullptr, n, k};
      const i64 count = experts * n * k;
      if constexpr (std::is_same_v<W, u8>) {
        made.group_scale = reinterpret_cast<const i8*>(at + count / 2);
        made.group = 32;
        at += count / 2 + count / 32;
      } else {
        at += count * i64(sizeof(W));
      }
      if constexpr (sizeof(W) == 1) made.scale = scale;
      return made;
    };
    for (i64 layer = 0; layer < layers; ++layer) {
      const Matrix gate_up = next(2 * inter, hidden), down = next(hidden, inter);
      moe_experts(t, Experts<bf16, W, X>{{static_cast<const X*>(x), hidden}, {scale, 0},
                                         {ids + layer * rows * top_k, top_k}, {scale, top_k}, gate_up, down, SILU,
                                         1.0f, 0.0f, false, rows, top_k, experts, hidden, inter,
                                         {static_cast<bf16*>(out), hidden}, work});
      t.barrier();
    }
  };
  parallel(pool, region);
}
#define BENCH_EXPERTS(NAME, W, X) \
  EXPORT void bench_experts_##NAME(void* pool, const void* x, const i32* ids, const float* scale, i64 rows, i64 top_k, \
                                   i64 layers, const char* w, i64 experts, i64 hidden, i64 inter, void* out, \
                                   char* work) { \
    bench_experts<W, X>(pool, x, ids, scale, rows, top_k, layers, w, experts, hidden, inter, out, work); \
  }
BENCH_EXPERTS(bf16, bf16, bf16)
BENCH_EXPERTS(int8, i8, bf16)
BENCH_EXPERTS(w8a8, i8, i8)
BENCH_EXPERTS(w4a8, u8, i8)
EXPORT void bench_sample(void* pool, const SampleArgs* a, i64 rows, const float* logits, char* scratch,
                         i64 per_thread) {
  auto region = [&](Team& t) { sample_rows(t, *a, 0, rows, {logits, a->vocab_size}, {scratch, per_thread}); };
  parallel(pool, region);
}
template <class S>
void bench_attention(void* pool, const void* q, void* out, void* cache, i64 kv_heads, i64 dim, const i32* table,
                     i64 max_blocks, const i32* starts, const i32* lengths, i64 seqs, i64 heads) {
  Attention<bf16, Cache<S>> a{{static_cast<const bf16*>(q), heads * dim}, {static_cast<bf16*>(out), heads * dim},
                              {static_cast<S*>(cache), 1, 0, 16, kv_heads, dim}, table, max_blocks, starts, lengths,
                              nullptr, seqs, heads, 0.1f, 0.0f, CAUSAL, 0, nullptr, 0};
  auto region = [&](Team& t) { paged_attention(t, a); };
  parallel(pool, region);
}
EXPORT void bench_attention_bf16(void* pool, const void* q, void* out, void* cache, i64 kv_heads, i64 dim,
                                 const i32* table,
                                 i64 max_blocks, const i32* starts, const i32* lengths, i64 seqs, i64 heads) {
  bench_attention<bf16>(pool, q, out, cache, kv_heads, dim, table, max_blocks, starts, lengths, seqs, heads);
}
EXPORT void bench_attention_int8(void* pool, const void* q, void* out, void* cache, i64 kv_heads, i64 dim,
                                 const i32* table,
                                 i64 max_blocks, const i32* starts, const i32* lengths, i64 seqs, i64 heads) {
  bench_attention<i8>(pool, q, out, cache, kv_heads, dim, table, max_blocks, starts, lengths, seqs, heads);
}
"""
POOL_BYTES = 1 << 30  # size of the memory that weights rotate through
NUMBERS = 1 << 20  # number of random values, which repeat throughout that memory
SHAPES = ((3072, 1024), (1024, 3072), (4096, 4096))  # n, k
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
WEIGHT_BYTES = {"bf16": 2.0, "f32": 4.0, "int8": 1.0, "w8a8": 1.0, "w4a8": 0.5 + 1 / 32}  # bytes per element
EXPERTS = (2048, 768, 64, 8)  # hidden, intermediate, experts, top_k: a layer of Qwen3-MoE's kind
EXPERT_WEIGHTS = ("bf16", "int8", "w8a8", "w4a8")
EXPERT_ROWS = (1, 2, 4, 8)
VOCAB = 151936
SAMPLE_ROWS = (1, 32)
SAMPLED: dict[str, dict[str, float]] = {
    "greedy": {},
    "greedy, 5 logprobs": {"num_logprobs": 5},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "temperature, 5 logprobs": {"temperature": 0.8, "num_logprobs": 5},
}
# (sequences, new tokens of each, context length) for decode and prefill, with head dimension 128 and 8 KV heads.
ATTENTION = ((1, 1, 4096), (1, 1, 16384), (8, 1, 2048), (1, 512, 512), (1, 512, 4096))
CACHED_BYTES = {"bf16": 2 * 128, "int8": 128 + 4}  # bytes per token and head of K or of V


def numbers(count: int) -> NDArray[np.uint8]:
    """Return bytes that are numbers of both signs in float32, bfloat16 and int8.

    Zeros would not do, because a processor multiplies them faster.
    """
    bits = np.random.default_rng(0).integers(0, 1 << 16, count // 2, np.uint16)
    return (bits & 0x807F | 0x3F00).view(np.uint8)


class Bench:
    def __init__(self, isa: str, threads: int, seconds: float) -> None:
        self.library = ctypes.CDLL(str(build([Unit(SOURCE)], HEADERS, (isa,))[isa]))
        self.library.bench_open.restype = ctypes.c_void_p
        self.pool = ctypes.c_void_p(self.library.bench_open(threads))
        self.seconds, self.threads = seconds, threads
        # Use huge pages, like the runner's pool.
        pages = mmap.mmap(-1, POOL_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.memory: NDArray[Any] = np.frombuffer(pages, np.uint8)
        self.memory.view(np.uint16).reshape(-1, NUMBERS)[:] = numbers(2 * NUMBERS).view(np.uint16)

    def best(self, call: Callable[[int], None]) -> float:
        """Return the seconds of the fastest call that fits into the time; the argument of a call is its number."""
        call(0)
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < 5 or time.perf_counter() - begin < self.seconds:
            start = time.perf_counter()
            call(len(times) + 1)
            times.append(time.perf_counter() - start)
        return min(times)

    def call(self, name: str, *args: Any) -> None:
        def as_c(arg: Any) -> Any:
            if isinstance(arg, np.ndarray):
                return ctypes.c_void_p(arg.ctypes.data)
            return ctypes.c_int64(arg) if isinstance(arg, int) else ctypes.byref(arg)

        getattr(self.library, name)(self.pool, *map(as_c, args))

    def rate(self, num_bytes: int, name: str, *args: Any) -> float:
        """Return the bytes per second of one call."""
        start = time.perf_counter()
        self.call(name, *args)
        return num_bytes / (time.perf_counter() - start)

    def read(self) -> dict[str, Any]:
        sink, size = np.zeros(self.threads, np.float32), POOL_BYTES // 4
        seconds = self.best(lambda _: self.call("bench_read", self.memory, size, sink))
        return {"kernel": "read probe", "gb_per_s": POOL_BYTES / seconds / 1e9}

    def linear(self, dtype: str, rows: int, n: int, k: int) -> dict[str, Any]:
        size = int(n * k * WEIGHT_BYTES[dtype])
        places = POOL_BYTES // size
        x, out = numbers(rows * k * 4), np.zeros(rows * n * 4, np.uint8)

        def call(index: int) -> None:
            weight = self.memory[index % places * size :][:size]
            self.call(f"bench_linear_{dtype}", x, rows, weight, n, k, out)

        seconds = self.best(call)
        rates = {"gb_per_s": size / seconds / 1e9, "gflop_per_s": 2 * rows * n * k / seconds / 1e9}
        return {"kernel": f"linear {dtype}", "shape": f"{rows} x {n} x {k}", **rates}

    def experts(self, dtype: str, rows: int) -> dict[str, Any]:
        """Measure a decode step of `rows` sequences through as many layers as the memory holds."""
        hidden, inter, experts, top_k = EXPERTS
        of_one = int(3 * hidden * inter * WEIGHT_BYTES[dtype])
        layers = POOL_BYTES // (experts * of_one)
        source = np.random.default_rng(0)
        # A single sequence takes the experts in turn, so that none is read again soon; several sequences choose at
        # random.
        orders = [source.permutation(experts) for _ in range(layers)]
        steps = []
        for step in range(16):
            taken = np.arange(step * top_k, (step + 1) * top_k) % experts
            chosen = [
                order[taken][None] if rows == 1 else [source.permutation(experts)[:top_k] for _ in range(rows)]
                for order in orders
            ]
            steps.append(np.array(chosen, np.int32))
        touched = [sum(len(np.unique(layer)) for layer in step) for step in steps]
        x, out, work = numbers(rows * hidden * 4), np.zeros(rows * hidden * 4, np.uint8), np.zeros(16 << 20, np.uint8)
        scale, sink = np.ones(experts * 3 * hidden, np.float32), np.zeros(self.threads, np.float32)
        places = POOL_BYTES // (max(touched) * of_one)
        shares: list[float] = []
        rates: list[float] = []
        begin = time.perf_counter()
        while len(shares) < 5 or time.perf_counter() - begin < self.seconds:
            ids, num_bytes = steps[len(shares) % 16], touched[len(shares) % 16] * of_one
            place = self.memory[len(shares) % places * num_bytes :]
            probe = self.rate(num_bytes, "bench_read", place, num_bytes // 4, sink)
            args = (x, ids, scale, rows, top_k, layers, self.memory, experts, hidden, inter, out, work)
            rates.append(self.rate(num_bytes, f"bench_experts_{dtype}", *args))
            shares.append(rates[-1] / probe)
        shape = f"{rows} rows, {sum(touched) / 16 / layers:.1f} of {experts}"
        share = {"of_probe": float(np.median(shares))}
        return {"kernel": f"experts {dtype}", "shape": shape, "gb_per_s": max(rates) / 1e9, **share}

    def sample(self, name: str, count: int) -> dict[str, Any]:
        """Measure sampling of `count` rows of random logits beside the time to read them just before; use medians."""
        logits = (np.random.default_rng(0).standard_normal((count, VOCAB)) * 3).astype(np.float32)
        greedy = SampleRows.greedy(np.arange(count, dtype=np.int32))
        changed: dict[str, Any] = {
            field: np.full(count, value, getattr(greedy, field).dtype) for field, value in SAMPLED[name].items()
        }
        rows = replace(greedy, **changed)
        results: dict[str, Any] = {
            "failed": np.uint8,
            "token_ids": np.int32,
            "last_ids": np.int32,
            "logprobs": np.float32,
        }
        results |= {"ranks": np.int32, "top_ids": np.int32, "top_logprobs": np.float32}
        arrays = {field: getattr(rows, field) for field in abi.SAMPLE_ROW_FIELDS}
        arrays |= {field: np.zeros((count, 5), kind) for field, kind in results.items()}
        args = abi.SampleArgs(ctypes.pointer(abi.StepArgs(num_rows=count)), VOCAB, max_top=5)
        for field, array in arrays.items():
            setattr(args, field, array.ctypes.data)
        size = align(sample_row_bytes(VOCAB))
        scratch, sink = np.zeros(size * self.threads + 64, np.uint8), np.zeros(self.threads, np.float32)
        scratch = scratch[-scratch.ctypes.data % 64 :]
        times: list[tuple[float, float]] = []
        begin = time.perf_counter()
        while len(times) < 5 or time.perf_counter() - begin < self.seconds:
            rows.counters += np.uint64(1)
            start = time.perf_counter()
            self.call("bench_read", logits, logits.size, sink)
            between = time.perf_counter()
            self.call("bench_sample", args, count, logits, scratch, size)
            times.append((between - start, time.perf_counter() - between))
        read, sampled = np.median(times, axis=0)
        rate = {"gb_per_s": logits.nbytes / sampled / 1e9, "us": sampled * 1e6, "reads": sampled / read}
        return {
            "kernel": "sample",
            "shape": f"{count} x {VOCAB}, {name}",
            **{key: float(value) for key, value in rate.items()},
        }

    def attention(self, cached: str, heads: int, seqs: int, new: int, context: int) -> dict[str, Any]:
        kv_heads, dim = 8, 128
        blocks = context // 16
        tables = np.arange(seqs * blocks, dtype=np.int32)
        starts, lengths = np.arange(seqs + 1, dtype=np.int32) * np.int32(new), np.full(seqs, context, np.int32)
        q = numbers(seqs * new * heads * dim * 2).view(np.uint16)
        out = np.zeros_like(q)
        size = seqs * context * 2 * kv_heads * CACHED_BYTES[cached]
        places = POOL_BYTES // size

        def call(index: int) -> None:
            cache = self.memory[index % places * size :][:size]
            where = (kv_heads, dim, tables, blocks, starts, lengths, seqs, heads)
            self.call(f"bench_attention_{cached}", q, out, cache, *where)

        seconds = self.best(call)
        pairs = seqs * sum(context - new + i + 1 for i in range(new))
        rates = {"gb_per_s": size / seconds / 1e9, "gflop_per_s": 4 * pairs * heads * dim / seconds / 1e9}
        shape = f"{seqs} x {new} new of {context}, {heads} heads"
        return {"kernel": f"attention {cached}", "shape": shape, "us": 1e6 * seconds, **rates}


def attention_rows(bench: Bench, heads: int) -> list[dict[str, Any]]:
    """Measure attention over K and V in bfloat16 and in int8, in turn."""
    return [bench.attention(cached, heads, *case) for case in ATTENTION for cached in CACHED_BYTES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--isa", default="auto", choices=("auto", *ISAS))
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds per row")
    parser.add_argument("--only", nargs="+", choices=WEIGHT_BYTES, help="measure only products with these weights")
    parser.add_argument("--experts", action="store_true", help="measure only layers of experts")
    parser.add_argument("--sample", action="store_true", help="measure only sampling, from logits to ids")
    parser.add_argument("--attention", action="store_true", help="measure only attention")
    parser.add_argument("--heads", type=int, default=16, help="number of query heads, with 8 KV heads")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    isa = choose_isa(args.isa, ISAS)
    bench = Bench(isa, args.threads, args.seconds)
    rows = [bench.read()]
    chosen = args.experts or args.sample or args.attention
    if args.only or not chosen:
        rows += [
            bench.linear(dtype, count, n, k) for dtype in args.only or WEIGHT_BYTES for n, k in SHAPES for count in ROWS
        ]
    everything = not (args.only or chosen)
    if everything or args.experts:
        rows += [bench.experts(dtype, count) for dtype in EXPERT_WEIGHTS for count in EXPERT_ROWS]
    if everything or args.sample:
        rows += [bench.sample(name, count) for count in SAMPLE_ROWS for name in SAMPLED]
    if everything or args.attention:
        rows += attention_rows(bench, args.heads)
    rows.append(bench.read())
    if args.json:
        print(json.dumps({"isa": isa, "threads": args.threads, "rows": rows}))
        return
    print(f"isa {isa}, {args.threads} threads, best of each")
    for row in rows:
        flops = f"{row['gflop_per_s']:8.1f} GFLOP/s" if "gflop_per_s" in row else ""
        time_ = f" {row['us']:9.1f} us" if "us" in row else ""
        share = f"{row['of_probe']:8.2f} of the probe" if "of_probe" in row else ""
        share = f", {row['reads']:.1f} reads" if "reads" in row else share
        print(f"{row['kernel']:16} {row.get('shape', ''):34} {row['gb_per_s']:7.1f} GB/s {flops}{time_}{share}")


if __name__ == "__main__":
    main()
