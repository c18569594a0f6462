"""The recipes of the shipped models: their configurations, and how long each is trained."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from corpus import BOS, EOS, PAD, SPECIAL_TOKENS, VOCAB_SIZE
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

TOKENS_PER_STEP = 4096


@dataclass(frozen=True)
class Recipe:
    """The recipe that builds and trains one model.

    phases: pairs (sequence length, steps), run in order; every step sees TOKENS_PER_STEP tokens.
    """

    config: Callable[[], PreTrainedConfig]
    phases: tuple[tuple[int, int], ...]
    learning_rate: float
    summary: str
    expect: str
    target: str | None = None  # the model that this one drafts for in speculative decoding

    @property
    def num_steps(self) -> int:
        return sum(steps for _, steps in self.phases)


def common_config() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": SPECIAL_TOKENS.index(EOS),
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
    }


def llama_config(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        rms_norm_eps=1e-5,
        **common_config(),
    )


def moe_config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=192,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        router_aux_loss_coef=0.01,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        **(common_config() | {"head_dim": 64}),
    )


RECIPES = {
    "tiny-llama": Recipe(
        config=lambda: llama_config(256, 768, 6, 4, 2),
        phases=((512, 2200), (2048, 260), (4096, 140)),
        learning_rate=3e-3,
        summary="Llama: 6 layers, hidden size 256, 4 heads of 64 over 2 KV heads, tied embeddings",
        expect="It writes text with\nthe look of Python and of docstrings; what it says is seldom right.",
    ),
    "tiny-draft": Recipe(
        config=lambda: llama_config(128, 192, 2, 2, 1),
        phases=((512, 2500), (2048, 300), (4096, 200)),
        learning_rate=3e-3,
        summary="Llama: 2 layers, hidden size 128; the draft model of tiny-llama for speculative decoding",
        expect="It is there to\nguess tiny-llama's next tokens; alone it soon repeats itself.",
        target="tiny-llama",
    ),
    "tiny-moe": Recipe(
        config=moe_config,
        phases=((512, 1400), (2048, 130), (4096, 70)),
        learning_rate=3e-3,
        summary="Qwen3-MoE: 4 layers, hidden size 256, 8 experts of width 192, top 2, tied embeddings",
        expect="It writes text with\nthe look of Python; what it says is seldom right.",
    ),
}
