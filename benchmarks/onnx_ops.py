"""Compare onnxruntime's own ops with standard ONNX ops, one op per model, to choose the ops of `--target onnx`.

    python benchmarks/onnx_ops.py [--turns 7] [--threads N] [--out FILE]

The products are [rows, 2048] by [2048, 2048] with weights in float32, int8 and four bits, at both accuracy levels of
MatMulNBits (level 4 lets it round rows to int8). Attention has 16 heads over 4 KV heads of 64 in float32, over a cache
whose rows have room for `capacity` tokens and hold `filled`. The variants run in turn and medians count; the memory's
read bandwidth is measured before and after.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from measured import ROOT, save
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from inferc.cost.machine import measure_read
from inferc.system.resources import available_cores

SIZE, HEADS, KV_HEADS, HEAD_DIM = 2048, 16, 4, 64
MICROSOFT = "com.microsoft"
ATTENTIONS = ((8, 1, 256, 200), (8, 1, 2048, 200), (8, 1, 2048, 1900), (1, 128, 2048, 0), (1, 128, 2048, 512))
Array = NDArray[Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "onnx-ops.json")
    options = parser.parse_args()
    reads = [measure_read(options.threads) / 1e9]
    rows = [*products(options), *attentions(options)]
    reads.append(measure_read(options.threads) / 1e9)
    for row in rows:
        cells = ", ".join(f"{name} {milliseconds:.3f}" for name, milliseconds in row["ms"].items())
        print(f"{row['what']}: ms {cells}")
    print(f"memory read: {reads[0]:.1f} and {reads[1]:.1f} GB/s")
    save({"threads": options.threads, "rows": rows, "read_gb_s": reads}, options.out)


def session(nodes: list[Any], weights: dict[str, Array], inputs: list[Any], outputs: list[Any], threads: int) -> Any:
    initializers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "op", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    how = onnxruntime.SessionOptions()
    how.intra_op_num_threads, how.log_severity_level = threads, 3
    how.add_session_config_entry(
        "session.intra_op.allow_spinning", "0"
    )  # spinning threads of the other sessions would take the cores
    return onnxruntime.InferenceSession(model.SerializeToString(), how, providers=["CPUExecutionProvider"])


def medians(runs: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Run the functions in turn and return the median milliseconds of each; the first turn warms up."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            found[name] += [1e3 * (time.perf_counter() - start)] if turn else []
    return {name: round(statistics.median(each), 4) for name, each in found.items()}


# ------------------------------------------------------------------------------------------------- products


def products(options: argparse.Namespace) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((SIZE, SIZE)).astype(np.float32)
    scale = np.abs(weight).max(1) / 127
    integers = np.rint(weight / scale[:, None]).astype(np.int8)
    sizes = {"N": SIZE, "K": SIZE}

    def nbits(bits: int, block: int, level: int) -> Any:
        blocks = SIZE // block
        if bits == 8:
            packed = (integers.astype(np.int16) + 128).astype(np.uint8).reshape(SIZE, blocks, block)
        else:
            packed = rng.integers(0, 256, (SIZE, blocks, block // 2), dtype=np.uint8)
        scales = np.repeat(scale[:, None], blocks, 1).astype(np.float32)
        how: dict[str, Any] = {**sizes, "bits": bits, "block_size": block, "accuracy_level": level}
        node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain=MICROSOFT, **how)
        return product([node], {"w": packed, "s": scales})

    def product(nodes: list[Any], weights: dict[str, Array]) -> Any:
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", SIZE]) for name in "xy")
        return session(nodes, weights, [x], [y], options.threads)

    rounding = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["xi", "xs", "xz"]),
        helper.make_node("MatMulInteger", ["xi", "w", "xz"], ["sums"]),
        helper.make_node("Cast", ["sums"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["wide", "xs"], ["once"]),
        helper.make_node("Mul", ["once", "s"], ["y"]),
    ]
    widening = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["wide"], axis=0),
        helper.make_node("Gemm", ["x", "wide"], ["y"], transB=1),
    ]
    sessions = {
        "float32 Gemm": product([helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)], {"w": weight}),
        "int8 DequantizeLinear, Gemm": product(widening, {"w": integers, "s": scale.astype(np.float32)}),
        "int8 MatMulInteger": product(rounding, {"w": integers.T.copy(), "s": scale.astype(np.float32)}),
        "int8 MatMulNBits": nbits(8, 128, 0),
        "int8 MatMulNBits, level 4": nbits(8, 128, 4),
        "4 bits MatMulNBits": nbits(4, 32, 0),
        "4 bits MatMulNBits, level 4": nbits(4, 32, 4),
    }
    found = []
    for rows in (1, 8, 128):
        x = rng.standard_normal((rows, SIZE)).astype(np.float32)
        runs = {name: partial(each.run, None, {"x": x}) for name, each in sessions.items()}
        found.append({"what": f"product of {rows} rows", "ms": medians(runs, options.turns)})
    return found


# ------------------------------------------------------------------------------------------------ attention


def attentions(options: argparse.Namespace) -> list[dict[str, Any]]:
    own, standard = own_attention(options.threads), standard_attention(options.threads)
    found = []
    for num_seqs, num_new, capacity, filled in ATTENTIONS:
        arrays = attention_inputs(num_seqs, num_new, capacity, filled)
        runs = {
            "GroupQueryAttention": bound(own, arrays["own"], arrays["caches"]),
            "TensorScatter, Attention": bound(standard, arrays["standard"], arrays["caches"]),
        }
        what = f"attention of {num_seqs} x {num_new} tokens, capacity {capacity}, filled {filled}"
        found.append({"what": what, "ms": medians(runs, options.turns)})
    return found


def own_attention(threads: int) -> Any:
    heads = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "scale": HEAD_DIM**-0.5}
    names = ["q", "k", "v", "k_cache", "v_cache", "last", "longest"]
    node = helper.make_node("GroupQueryAttention", names, ["y", "k_out", "v_out"], domain=MICROSOFT, **heads)
    flat = ["b", "t", HEADS * HEAD_DIM]
    inputs = [_float("q", flat), *(_float(name, ["b", "t", KV_HEADS * HEAD_DIM]) for name in "kv"), *_caches()]
    inputs += [helper.make_tensor_value_info("last", TensorProto.INT32, ["b"])]
    inputs += [helper.make_tensor_value_info("longest", TensorProto.INT32, [])]
    return session([node], {}, inputs, [_float("y", flat), *_caches("out")], threads)


def standard_attention(threads: int) -> Any:
    nodes = [
        helper.make_node("TensorScatter", ["k_cache", "k", "starts"], ["k_out"], axis=2, mode="linear"),
        helper.make_node("TensorScatter", ["v_cache", "v", "starts"], ["v_out"], axis=2, mode="linear"),
        helper.make_node(
            "Attention",
            ["q", "k_out", "v_out", "", "", "", "lengths"],
            ["y"],
            is_causal=1,
            scale=HEAD_DIM**-0.5,
        ),
    ]
    inputs = [_float("q", ["b", HEADS, "t", HEAD_DIM])]
    inputs += [_float(name, ["b", KV_HEADS, "t", HEAD_DIM]) for name in "kv"]
    inputs += _caches() + [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["b"]) for name in ("starts", "lengths")
    ]
    return session(nodes, {}, inputs, [_float("y", ["b", HEADS, "t", HEAD_DIM]), *_caches("out")], threads)


def _float(name: str, shape: list[Any]) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _caches(end: str = "cache") -> list[Any]:
    return [_float(f"{name}_{end}", ["b", KV_HEADS, "capacity", HEAD_DIM]) for name in "kv"]


def attention_inputs(num_seqs: int, num_new: int, capacity: int, filled: int) -> dict[str, dict[str, Array]]:
    """Return the same random inputs in the form of each variant; sequences differ in length by a few tokens."""
    rng = np.random.default_rng(0)
    starts = np.maximum(filled - 7 * np.arange(num_seqs), 0)
    lengths = starts + num_new
    new = {
        name: rng.standard_normal((num_seqs, num_new, heads, HEAD_DIM)).astype(np.float32)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    }
    shape = (num_seqs, KV_HEADS, capacity, HEAD_DIM)
    return {
        "own": {
            **{name: value.reshape(num_seqs, num_new, -1) for name, value in new.items()},
            "last": (lengths - 1).astype(np.int32),
            "longest": np.array(lengths.max(), np.int32),
        },
        "standard": {
            **{name: np.ascontiguousarray(value.transpose(0, 2, 1, 3)) for name, value in new.items()},
            "starts": starts.astype(np.int64),
            "lengths": lengths.astype(np.int64),
        },
        "caches": {f"{name}_cache": rng.standard_normal(shape).astype(np.float32) for name in "kv"},
    }


def bound(session: Any, inputs: dict[str, Array], caches: dict[str, Array]) -> Callable[[], object]:
    """Return a function that runs a session with its caches updated in place."""
    binding = session.io_binding()
    result = np.empty_like(inputs["q"])
    outputs = {"y": result, **{name.replace("cache", "out"): array for name, array in caches.items()}}
    for name, array in {**inputs, **caches}.items():
        binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for name, array in outputs.items():
        binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def run() -> object:
        assert result is not None and inputs and caches, "the binding holds addresses alone"
        return session.run_with_iobinding(binding)

    return run


if __name__ == "__main__":
    main()
