"""Quantized programs of several ranks: each quantizes its own part of a weight, and together they are the whole."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import CONFIG, Model, random_module, run, weight_bytes

from inferc.backends.partition import Ranks, partition
from inferc.manifest_types import Quantization

KINDS: dict[str, tuple[str, dict[str, Any], Ranks]] = {
    "tp": ("llama", {}, Ranks(tp=2)),
    "pp": ("llama", {}, Ranks(pp=2)),
    "ep": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, Ranks(ep=2)),
}
PROMPTS = [torch.randint(0, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (21, 6)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [Ranks(tp=2), Ranks(pp=2)], ids=["tp", "pp"])
def test_ranks_store_their_heads_in_int8(ranks: Ranks) -> None:
    """Rows are rounded head by head, so ranks round as the whole does but for ties of another order of additions."""
    model = Model(random_module("llama"))
    config = replace(CONFIG, kv_dtype="int8")
    plain = run(partition(model.prepared, CONFIG, Ranks()), model.reader, PROMPTS, 16)
    whole = run(partition(model.prepared, config, Ranks()), model.reader, PROMPTS, 16)
    made = partition(model.prepared, config, ranks)
    for found, expected, unrounded in zip(run(made, model.reader, PROMPTS, 16), whole, plain, strict=True):
        rounding = (expected - unrounded).pow(2).mean().sqrt()
        assert 1e-5 < rounding / unrounded.pow(2).mean().sqrt() < 0.05
        assert (found - expected).pow(2).mean().sqrt() < 0.2 * rounding
    bytes_per_token = [sum(group.bytes_per_token for group in each.program.kv_groups) for each in made]
    (alone,) = (each.program.kv_groups for each in partition(model.prepared, config, Ranks()))
    assert sum(bytes_per_token) == sum(group.bytes_per_token for group in alone)


@pytest.mark.quick("ep-int4")
@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("tp", "w8a8"),
        *[pytest.param("tp", scheme, marks=pytest.mark.slow) for scheme in ("int8", "int4")],
        *[pytest.param("pp", scheme, marks=pytest.mark.slow) for scheme in ("int8", "w8a8", "int4")],
        *[pytest.param("ep", scheme, marks=pytest.mark.slow) for scheme in ("int8", "w8a8", "int4")],
    ],
)
def test_ranks_together_are_the_whole(kind: str, scheme: str) -> None:
    family, fields, ranks = KINDS[kind]
    model = Model(random_module(family, **fields))
    config = replace(CONFIG, quantize=scheme)
    plain = run(model.whole(), model.reader, PROMPTS, 16)
    made = partition(model.prepared, config, ranks)
    for found, expected in zip(run(made, model.reader, PROMPTS, 16), plain, strict=True):
        error = (found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
        assert 1e-4 < error < (0.4 if scheme == "int4" else 0.1)
    assert all(isinstance(each.program.info.quantization, Quantization) for each in made)
    unquantized = partition(model.prepared, CONFIG, ranks)
    for each, whole in zip(made, unquantized, strict=True):
        assert weight_bytes(each.program) < 0.6 * weight_bytes(whole.program)
