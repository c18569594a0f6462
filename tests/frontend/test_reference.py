"""The reference runner against `generate` of transformers."""

import json
import shutil
from pathlib import Path

import torch
import transformers

from inferc.frontend.checkpoint.load import load, load_module
from inferc.frontend.reference import reference_greedy, reference_logits, reference_model

PROMPT = [5, 17, 200, 3]


def test_greedy_is_generate(tiny_llama_folder: Path) -> None:
    model = reference_model(load(tiny_llama_folder), "float32")
    found = reference_greedy(model, PROMPT, 12)
    ids = torch.tensor([PROMPT])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[0, 4:]
    assert found[: len(expected)] == expected.tolist()
    assert len(found) == 12
    logits = reference_logits(model, PROMPT)
    assert logits.dtype == torch.float32
    assert int(logits[-1].argmax()) == found[0]


def test_an_attention_that_a_config_names_is_not_needed(tiny_llama_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama_folder, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "_attn_implementation": "flash_attention_2"}))
    model = reference_model(load(folder), "float32")
    expected = reference_logits(reference_model(load(tiny_llama_folder), "float32"), PROMPT)
    torch.testing.assert_close(reference_logits(model, PROMPT), expected)


def test_a_module_is_copied(tiny_llama_folder: Path) -> None:
    module = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama_folder)
    narrow = reference_model(load_module(module), "bfloat16")
    assert narrow.lm_head.weight.dtype == torch.bfloat16
    assert narrow.model.rotary_emb.inv_freq.dtype == torch.float32
    assert module.lm_head.weight.dtype == torch.float32
    wide = reference_model(load_module(module), "float32")
    expected = reference_logits(reference_model(load(tiny_llama_folder), "float32"), PROMPT)
    torch.testing.assert_close(reference_logits(wide, PROMPT), expected)
