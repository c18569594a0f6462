"""A block that is computed again after it was evicted is not copied from before the step that computes it."""

from __future__ import annotations

import numpy as np
from fake_runner import make_engine, oracle

from inferc.runtime.kv_cache.partial_index import PartialIndex
from inferc.runtime.step.sampling_params import SamplingParams


def test_a_block_that_is_listed_again_has_the_step_that_computes_it_now() -> None:
    index, ids = PartialIndex(), np.arange(8, dtype=np.int32)
    index.add(b"parent", ids, b"name", 1, lambda name: True)
    index.add(b"parent", ids, b"name", 5, lambda name: True)  # evicted meanwhile, and computed anew in step 5
    assert index.find(b"parent", ids[:6], 5, lambda name: True) is None
    assert index.find(b"parent", ids[:6], 6, lambda name: True) == (b"name", 6)


def test_part_of_a_block_that_was_evicted_and_is_computed_again() -> None:
    """Two sequences come at once: one computes the block anew, and the other shares only part of it."""
    engine = make_engine(
        prefix_cache=True, partial_blocks=True, block_size=8, num_blocks=9, max_num_batched_tokens=64, max_model_len=64
    )
    text, params = list(range(17)), SamplingParams(max_tokens=2, temperature=0)
    prompts = {"first": [text], "evicts": [[30 + number % 20 for number in range(60)]], "again": [text, text[:14]]}
    for name, each in prompts.items():
        found: dict[str, list[int]] = {}
        for number, prompt in enumerate(each):
            engine.add_request(f"{name} {number}", prompt, params)
        while engine.has_work:
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
        for number, prompt in enumerate(each):
            assert found[f"{name} {number}"] == oracle(prompt, params, (), 64)[0]
