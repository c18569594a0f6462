"""Random-weight Hugging Face folders of each family, small enough to compile in a test."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "mixtral")
TEXT = (
    "def add(first, second):\n    return first + second\n",
    "for name in sorted(names):\n    print(name, len(name))\n",
    "The quick brown fox jumps over the lazy dog. Café, naïve, 東京, 🙂.\n",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
MOE_SIZES = {"num_local_experts": 4, "num_experts_per_tok": 2}


def make_tokenizer(folder: Path) -> int:
    """Write a byte-level BPE tokenizer with a chat template to `folder`; returns its vocabulary size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 256,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return int(tokenizer.get_vocab_size())


def make_random_model(
    family: str, folder: Path, dtype: str = "float32", *, seed: int = 0, max_shard_size: str = "1GB", **overrides: Any
) -> Path:
    """Write a random model of `family` ("llama", …) with its tokenizer to `folder`, and return the folder.

    `overrides` are fields of the Hugging Face config, `...` for one that is not to be given. Norms and biases are
    random too, as nothing that a pass could lose may be neutral, and the weights are large enough that greedy tokens
    are no near-ties.
    """
    import torch

    transformers: Any = importlib.import_module("transformers")
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = make_tokenizer(folder)
    sizes = {**SIZES, "vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    if family in ("mixtral", "qwen3_moe"):
        sizes.update(MOE_SIZES)
    if family == "qwen3_moe":
        sizes.update(num_experts=sizes.pop("num_local_experts"), moe_intermediate_size=32)
    fields = {name: value for name, value in {**sizes, **overrides}.items() if value is not ...}
    config = transformers.AutoConfig.for_model(family, **fields)
    config.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
        for name, buffer in model.named_buffers():  # what a router adds to its scores
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    model.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=1)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
