"""The generator of one ONNX model from a lowered Program over a dense KV cache.

The model's weights are the artifact's own files. Its inputs and outputs are the program's, and the caches are outputs
too: `k_cache_3` comes back as `k_cache_3.out`, which a caller binds to the same memory, so that TensorScatter writes in
place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

from inferc.codegen.kernel import Kernel
from inferc.codegen.onnx.calls import elementwise
from inferc.codegen.onnx.graph import MICROSOFT, OPSET, OnnxGraph
from inferc.codegen.onnx.table import KERNELS
from inferc.codegen.select import chosen_kernel, needs_kernel
from inferc.codegen.values import outputs
from inferc.ir.program import Program, named_arguments, target_name
from inferc.manifest_types import StoredWeight

IR_VERSION = 11
DOMAINS = {"": OPSET, MICROSOFT: 1}
ALIASES = {"aten.slice.Tensor": elementwise.slice_, "aten.view": elementwise.view, "getitem": elementwise.part}


def emit(
    program: Program, weights: Mapping[str, StoredWeight], producer: str, kernels: Sequence[Kernel] = KERNELS
) -> bytes:
    """Return the serialized model; `weights` are by the program's names, in files beside the model."""
    graph = build(program, weights, kernels)
    hidden, logits = outputs(program)
    assert logits is not None, "the ranks of a pipeline are not exported"
    results = {"hidden": graph.value(hidden), "logits": graph.value(logits), **written_caches(graph)}
    return serialized(graph, results, producer)


def written_caches(graph: OnnxGraph) -> dict[str, ir.Value]:
    """Return the values of the caches after the step, by the names of their outputs."""
    found = {}
    for node in graph.program.graph.nodes:
        op = target_name(node.target) if node.op == "call_function" else ""
        if op == "inferc.dense_write":
            found[f"{node.args[0].name}.out"] = graph.value(node)
        elif op == "inferc.dense_write_attention":
            named = named_arguments(node)
            for name, value in zip(("k_cache", "v_cache"), graph.value(node)[1:], strict=True):
                found[f"{named[name].name}.out"] = value
    return found


def build(program: Program, weights: Mapping[str, StoredWeight], kernels: Sequence[Kernel] = KERNELS) -> OnnxGraph:
    """Write every node of the program as ONNX ops."""
    graph = OnnxGraph(program, weights)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            graph.input(node)
        elif node.op == "call_function":
            call = ALIASES.get(target_name(node.target))
            if needs_kernel(node):
                call = chosen_kernel(node, "onnx", tuple(kernels)).load_emit()
            assert call is not None
            graph.emit(node, call)
    return graph


def serialized(graph: OnnxGraph, results: Mapping[str, ir.Value], producer: str) -> bytes:
    """Serialize a model with these results, which get the given names as the names of its outputs."""
    values = []
    for name, value in results.items():
        value.name = graph.unique(name)
        values.append(value)
    made = ir.Graph(
        graph.inputs,
        values,
        nodes=graph.tape.nodes,
        initializers=graph.initializers,
        opset_imports={domain: DOMAINS[domain] for domain in sorted(graph.domains)},
        name=graph.program.name,
    )
    producer_name, _, version = producer.partition(" ")
    model = ir.Model(made, ir_version=IR_VERSION, producer_name=producer_name, producer_version=version)
    proto: onnx.ModelProto = ir.serde.serialize_model(model)
    return proto.SerializeToString(deterministic=True)
