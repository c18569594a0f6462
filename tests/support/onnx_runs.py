"""Small programs through onnxruntime, beside the ops' references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from graphs import Example
from kernel_tables import choose_for
from torch import Tensor

from inferc.codegen.onnx.emit import build, serialized, written_caches
from inferc.ir.program import Program, dtype_name
from inferc.ir.weights import TensorReader, materialize, physical_shape
from inferc.manifest_types import StoredWeight
from inferc.runtime.runners.dense.onnxruntime import session_for
from inferc.system.cpu_features import cpu_features
from inferc.targets import Target

ONNX, STANDARD = Target.parse("onnx"), Target.parse("onnx:standard")


def write_weights(program: Program, reader: TensorReader, folder: Path) -> dict[str, StoredWeight]:
    """The program's weights as an artifact has them, in one file."""
    data, found = bytearray(), {}
    for name, weight in program.weights.items():
        raw = b"".join(part.reshape(-1).view(torch.uint8).numpy().tobytes() for part in materialize(weight, reader))
        places = (len(data), len(raw), dtype_name(weight.dtype), weight.shape, physical_shape(weight))
        found[name] = StoredWeight(name, "weights.bin", *places, weight.layout if weight.op == "pack" else "")
        data += raw + bytes(-len(raw) % 64)
    (folder / "weights.bin").write_bytes(data)
    return found


def session_of(made: Example, folder: Path, target: Target = ONNX) -> onnxruntime.InferenceSession:
    """Open the program's model in onnxruntime, checked with its shapes; its results are called out0, out1, …"""
    program = made.program
    choose_for(target)(program)
    graph = build(program, write_weights(program, made.reader, folder))
    outputs: Any = program.output().args[0]
    results = {f"out{index}": graph.value(node) for index, node in enumerate(outputs)} | written_caches(graph)
    path = folder / "model.onnx"
    path.write_bytes(serialized(graph, results, "test 1"))
    onnx.checker.check_model(str(path), full_check=True)
    options = onnxruntime.SessionOptions()
    for name, value in session_for(cpu_features()).items():
        options.add_session_config_entry(name, value)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_onnx(made: Example, folder: Path, target: Target = ONNX) -> list[Tensor]:
    """Return what onnxruntime makes of the example's inputs."""
    session = session_of(made, folder, target)
    wanted = {each.name for each in session.get_inputs()}
    arrays = {name: value.numpy() for name, value in made.inputs.items() if name in wanted}
    return [torch.from_numpy(np.asarray(each)) for each in session.run(None, arrays)]
