"""Equal layers are traced once, and the Program is that of a trace of all of them."""

import dataclasses
import functools
import json
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from families import FAMILIES
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import tiny_checkpoint
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama import modeling_llama

from inferc.errors import ArtifactError
from inferc.frontend import repeat
from inferc.frontend.checkpoint.load import Checkpoint
from inferc.frontend.export import export_model
from inferc.frontend.repeat import Blocks, find_blocks, kinds
from inferc.frontend.trace import torch_export as trace
from inferc.ir.program import Program, to_json

WINDOWS_AND_FULL = ["sliding_attention", "full_attention"]


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many layers each trace had: attention nodes, or softmaxes of models that compute it by themselves."""
    counts: list[int] = []
    run = trace.trace

    def counted(model: Any) -> Any:
        exported = run(model)
        ops = Counter(trace.op_name(node) for node in exported.graph.nodes)
        counts.append(ops["attention"] or ops["softmax"])
        return exported

    monkeypatch.setattr(trace, "trace", counted)
    return counts


def in_full(checkpoint: Checkpoint, dtype: str = "float32") -> Program:
    """The Program of a trace of all layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeat, "find_blocks", lambda kinds: None)
        return export_model(checkpoint, dtype)


def check_same(found: Program, expected: Program) -> None:
    assert found.to_text() == expected.to_text()
    assert list(found.weights.items()) == list(expected.weights.items())
    assert json.dumps(to_json(found)) == json.dumps(to_json(expected))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a" * 80, Blocks(1, 1, 79)),
        ("dddmmmmmmmm", Blocks(3, 1, 8)),
        ("sssssf" * 10 + "ss", Blocks(2, 6, 10)),
        ("sf" * 4, Blocks(2, 2, 3)),
        ("a" * 4, Blocks(1, 1, 3)),
        ("a" * 3, None),  # 3 layers of 3 would be traced
        ("sf" * 3, None),
        ("a" * 20 + "b", None),
        ("abcdefgh", None),
        ("a", None),
        ("", None),
    ],
)
def test_blocks(text: str, expected: Blocks | None) -> None:
    assert find_blocks(text) == expected


@given(st.text("ab", max_size=12), st.text("abc", min_size=1, max_size=4), st.integers(1, 12))
def test_blocks_say_how_the_whole_is_made(head: str, period: str, times: int) -> None:
    text = head + period * times
    found = find_blocks(text)
    if found is None:
        return
    start, stop = found.first, found.first + found.size
    assert text == text[:start] + text[start:stop] * found.times
    assert start > 0
    assert found.times > 2 and len(found.traced) == start + 2 * found.size <= 0.75 * len(text)


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 2.0},
        {"sizes": (1, [3])},
        {"table": {"a": {"b": 2}}},
        {"activation": torch.relu},
        {"gelu": partial(torch.nn.functional.gelu, approximate="tanh")},
        {"dtype": torch.bfloat16},
        {"names": {"a", "b"}},
        {"owner": object()},
        {"layer_idx": None},  # the one that says nothing
    ],
)
def test_a_layer_is_known_by_its_attributes(change: dict[str, Any]) -> None:
    same = {"scale": 1.0, "sizes": (1, [2]), "table": {"a": {"b": 1}}, "activation": torch.tanh, "owner": None}
    same |= {"gelu": partial(torch.nn.functional.gelu), "dtype": torch.float32, "names": {"a"}}
    layers = [torch.nn.Linear(2, 2) for _ in range(3)]
    for index, layer in enumerate(layers):
        vars(layer).update({**same, "layer_idx": index, **(change if index == 1 else {})})
    first, second, third = kinds(torch.nn.ModuleList(layers), torch.nn.Module())
    assert first == third
    assert (first == second) == ("layer_idx" in change)


@pytest.mark.parametrize(
    ("family", "num_layers", "num_traced", "dtype", "more"),
    [
        pytest.param("llama", 8, 3, "bfloat16", {}, marks=pytest.mark.slow),
        ("gpt2", 4, 3, "float32", {"n_layer": 4}),  # weights that are transposed in the graph
        pytest.param("gemma3_text", 8, 6, "float32", {"layer_types": WINDOWS_AND_FULL * 4}, marks=pytest.mark.slow),
        # a dense layer, then experts, each layer with a buffer
        pytest.param("deepseek_v3", 4, 3, "float32", {}, marks=pytest.mark.slow),
    ],
)
def test_the_program_is_that_of_a_full_trace(
    family: str, num_layers: int, num_traced: int, dtype: str, more: dict[str, Any], traces: list[int]
) -> None:
    checkpoint = tiny_checkpoint(family, **{"num_hidden_layers": num_layers, **more})
    check_same(export_model(checkpoint, dtype), in_full(checkpoint, dtype))
    assert traces == [num_traced, num_layers]


def deeper(name: str, num_layers: int) -> Checkpoint:
    """A row of the table with more layers, of the same kinds in the same order."""
    fields: dict[str, Any] = {"num_hidden_layers": num_layers}
    own = FAMILIES[name].fields
    fields.update(dict.fromkeys({"n_layer", "n_layers", "num_layers"} & own.keys(), num_layers))
    if pattern := own.get("layer_types"):
        fields["layer_types"] = (pattern * num_layers)[:num_layers]
    if types := own.get("attention_types"):  # [[kinds, how many times]]
        fields["attention_types"] = [[kinds, num_layers // len(kinds)] for kinds, _ in types]
    return tiny_checkpoint(name, **fields)


EVERY_FOURTH = ("cohere2", "exaone4", "llama4_text")  # a layer of another kind, by the class's own count


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if name != "gpt_neox_japanese"]
)  # whose last layer is another
def test_the_layers_of_every_family_repeat(name: str, traces: list[int]) -> None:
    own = FAMILIES[name].fields
    kinds = own.get("layer_types") or own.get("attention_types", [[None]])[0][0] or [None]
    num_layers = 16 if len(kinds) > 2 or name in EVERY_FOURTH else 8
    checkpoint = deeper(name, num_layers)
    check_same(export_model(checkpoint, "float32"), in_full(checkpoint))
    assert len(traces) == 2 and traces[0] <= num_layers * 3 // 4 and traces[1] == num_layers


@pytest.mark.slow
def test_layers_that_do_not_repeat_are_all_traced(traces: list[int]) -> None:
    found = export_model(
        tiny_checkpoint("gpt2", num_hidden_layers=4, n_layer=4, scale_attn_by_inverse_layer_idx=True), "float32"
    )
    attention = [node for node in found.graph.nodes if node.target == torch.ops.inferc.attention.default]
    scales = [node.args[4] for node in attention]
    assert traces[-1] == 4 and len(set(scales)) == 4


@pytest.mark.slow
def test_the_order_of_a_set_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3 computes a rope for each member of a set of layer types, whose order is another in every process."""
    checkpoint = tiny_checkpoint("gemma3_text", num_hidden_layers=2, layer_types=WINDOWS_AND_FULL)
    texts = []
    for reverse in (False, True):
        monkeypatch.setattr(modeling_gemma3, "set", functools.partial(sorted, reverse=reverse), raising=False)
        texts.append(export_model(checkpoint, "float32").to_text())
    assert texts[0] == texts[1]
    assert texts[0].index("@rotary_emb.sliding") < texts[0].index("@rotary_emb.full")  # as the layers need them


def replaced(how: Callable[[Any, torch.Tensor], torch.Tensor], patch: pytest.MonkeyPatch) -> None:
    """Make every layer of a Llama do `how` with what it would return."""
    forward = modeling_llama.LlamaDecoderLayer.forward

    def changed(self: Any, *args: Any, **keywords: Any) -> Any:
        return how(self, forward(self, *args, **keywords))

    patch.setattr(modeling_llama.LlamaDecoderLayer, "forward", changed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (lambda layer, hidden: hidden * (2.0 + layer.self_attn.layer_idx), "aten.mul.Tensor"),
        pytest.param(
            lambda layer, hidden: hidden.tanh() if layer.self_attn.layer_idx == 3 else hidden,
            "are of other modules",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_layers_that_only_look_equal_are_all_traced(
    how: Callable[[Any, torch.Tensor], torch.Tensor],
    reason: str,
    traces: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    replaced(how, monkeypatch)
    checkpoint = tiny_checkpoint("llama", num_hidden_layers=4)
    caplog.set_level(logging.INFO, "inferc")
    found = export_model(checkpoint, "float32")
    assert traces == [3, 4]
    (message,) = [
        record.getMessage() for record in caplog.records if "not as equal as they look" in record.getMessage()
    ]
    assert reason in message
    check_same(found, in_full(checkpoint))


@pytest.mark.slow
def test_what_is_computed_between_layers_is_no_block(
    traces: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of the model reads the output of every layer."""
    outputs: list[torch.Tensor] = []
    replaced(lambda layer, hidden: outputs.append(hidden) or hidden, monkeypatch)  # type: ignore[func-returns-value]
    norm = modeling_llama.LlamaModel.forward

    def summed(self: Any, *args: Any, **keywords: Any) -> Any:
        outputs.clear()
        result = norm(self, *args, **keywords)
        result.last_hidden_state = result.last_hidden_state + sum(outputs[1:], outputs[0])
        return result

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", summed)
    checkpoint = tiny_checkpoint("llama", num_hidden_layers=4)
    found = export_model(checkpoint, "float32")
    assert traces == [3, 4]
    check_same(found, in_full(checkpoint))


@pytest.mark.slow
def test_a_model_that_cannot_be_traced_by_blocks_is_traced_whole(
    traces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers are looked up by number."""
    forward = modeling_llama.LlamaModel.forward

    def looked_up(self: Any, *args: Any, **keywords: Any) -> Any:
        assert [layer.self_attn.layer_idx for layer in self.layers] == list(range(4))
        return forward(self, *args, **keywords)

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", looked_up)
    export_model(tiny_checkpoint("llama", num_hidden_layers=4), "float32")
    assert traces == [4]


def stored_as(checkpoint: Checkpoint, name: str, spec: tuple[tuple[int, ...], torch.dtype] | None) -> Checkpoint:
    """The checkpoint with one more tensor, one of another kind, or without one."""
    tensors = {**checkpoint.tensors, name: spec}
    return dataclasses.replace(checkpoint, tensors={key: value for key, value in tensors.items() if value is not None})


def test_every_layer_of_the_checkpoint_is_looked_at() -> None:
    checkpoint = tiny_checkpoint("llama", num_hidden_layers=8)
    name = "model.layers.5.mlp.up_proj.weight"
    with pytest.raises(ArtifactError, match=r"no tensor for model\.layers\.5\.mlp\.up_proj\.weight"):
        export_model(stored_as(checkpoint, name, None), "float32")
    with pytest.raises(ArtifactError, match=r"layers\.5\.mlp\.up_proj\.weight the shape \[96, 32\]"):
        export_model(stored_as(checkpoint, name, ((96, 32), torch.float32)), "float32")
    with pytest.raises(ArtifactError, match=r"tensor model\.layers\.5\.mlp\.up_proj\.bias has no use"):
        export_model(stored_as(checkpoint, "model.layers.5.mlp.up_proj.bias", ((96,), torch.float32)), "float32")


@pytest.mark.slow
def test_each_layer_has_the_weights_it_is_stored_with(traces: list[int]) -> None:
    checkpoint = stored_as(
        tiny_checkpoint("llama", num_hidden_layers=8), "model.layers.5.mlp.up_proj.weight", ((96, 64), torch.float16)
    )
    found = export_model(checkpoint, "float32")
    assert traces == [3]
    described = [str(found.weights[f"layers.{layer}.mlp.up_proj.weight"]) for layer in range(8)]
    assert described[5] == "cast(model.layers.5.mlp.up_proj.weight, float32)"
    assert described[4] == "model.layers.4.mlp.up_proj.weight"
    check_same(found, in_full(checkpoint))
