"""Rope scaling serves sequences beyond max_position_embeddings, with transformers' numbers, on the cpu target."""

from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import make_random_model

import inferc
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import ConfigError
from inferc.frontend.checkpoint.load import load
from inferc.frontend.reference import reference_greedy
from inferc.runtime.artifact.inspect import inspect_artifact

ORIGINAL = 64
MAX_MODEL_LEN = 128
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def model_with(rope: dict[str, Any], folder: Path) -> tuple[Path, Any]:
    """A folder, and transformers' model of it with a rope that nobody has fixed."""
    sizes: dict[str, Any] = {"max_position_embeddings": ORIGINAL, "num_hidden_layers": 1}
    made = make_random_model("llama", folder, **sizes, rope_parameters=rope)
    return made, load(made).model_class.from_pretrained(made)


@pytest.mark.slow
def test_yarn_beyond_the_original_length(tmp_path: Path) -> None:
    folder, model = model_with(YARN, tmp_path / "m")
    config = CompileConfig(certify="full", max_model_len=MAX_MODEL_LEN)
    certificate = compile(folder, tmp_path / "out", config).certificate
    assert certificate is not None and certificate.ok
    prompt = torch.randint(5, 300, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    params = inferc.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with inferc.LLM(tmp_path / "out") as llm:
        found = llm.generate([prompt], params)[0].outputs[0].token_ids
    assert found == reference_greedy(model, prompt, 24)


@pytest.mark.slow
def test_dynamic_is_that_of_the_longest_sequence(tmp_path: Path) -> None:
    """transformers takes the frequencies of the sequence's own length: they are equal at max_model_len tokens."""
    folder, model = model_with(DYNAMIC, tmp_path / "m")
    compile(folder, tmp_path / "out", CompileConfig(certify="none", max_model_len=MAX_MODEL_LEN))
    token_ids = torch.randint(5, 300, (MAX_MODEL_LEN,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(token_ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    with inferc.LLM(tmp_path / "out") as llm:
        score = llm.score(token_ids.tolist())
    found = torch.tensor(score.logprobs, dtype=torch.float32)
    torch.testing.assert_close(found, expected.gather(1, token_ids[1:, None])[:, 0], rtol=1e-4, atol=1e-4)
    assert score.argmax == expected.argmax(-1).tolist()
    (record,) = inspect_artifact(tmp_path / "out").model.rope
    assert (record["kind"], record["max_model_len"], record["differs_up_to"]) == ("dynamic", MAX_MODEL_LEN, ORIGINAL)


def test_what_the_scaling_does_not_reach_is_refused(tmp_path: Path) -> None:
    folder, _ = model_with(YARN, tmp_path / "m")
    with pytest.raises(ConfigError, match="max_model_len 257 is more than the 256 positions .* with its rope scaling"):
        compile(folder, tmp_path / "out", CompileConfig(certify="none", max_model_len=257))
