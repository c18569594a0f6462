"""The EAGLE-3 head as a PyTorch module: one decoder layer over a token and the hidden rows of three layers of a model.

Source: Li et al. 2025, arXiv:2503.01840. The names of its parameters are those of published checkpoints.

A row stands for the token at position p + 1, beside what the large model made of the tokens up to p. What the head
makes of a row, in front of its last norm, takes the place of the large model's rows when it goes on with a token of its
own. So `hidden_in` has both, side by side, and one of them is zero: [rows of the large model | a row of the head].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

OWN, OWN_NORMED = "layers.0.add_1", "norm.mul_1"
"""The nodes of the captured head that it goes on from: its layer's result, or that behind the last norm."""


class Eagle3Layer(nn.Module):
    """A decoder layer of Llama whose attention reads the token's embedding and the hidden row side by side."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            features = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * size, features, bias=config.attention_bias))
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, embeds: Tensor, hidden: Tensor, mask: Any, rope: Any, position_ids: Tensor) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat((self.input_layernorm(embeds), normed), -1)
        attended, _ = self.self_attn(
            hidden_states=both, attention_mask=mask, position_embeddings=rope, position_ids=position_ids
        )
        hidden = residual + attended
        result: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class Eagle3Head(LlamaPreTrainedModel):  # type: ignore[misc]
    """An EAGLE-3 head; see the module. Its config is a LlamaConfig with the fields that `head_config` adds."""

    config: LlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.given_width = config.num_hidden_inputs * config.target_hidden_size
        self.hidden_width = self.given_width + size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.input_norm = LlamaRMSNorm(self.given_width, eps=config.rms_norm_eps) if config.norm_before_fc else None
        self.fc = nn.Linear(self.given_width, size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, position_ids: Tensor, hidden_in: Tensor) -> Tensor:
        """Return the logits [1, T, draft_vocab_size] of the tokens that follow `input_ids` [1, T]."""
        embeds = self.embed_tokens(input_ids)
        given, own = hidden_in[..., : self.given_width], hidden_in[..., self.given_width :]
        if self.input_norm is not None:
            given = self.input_norm(given)
        hidden = own + self.fc(given)  # one of them is zero, and so exact
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=embeds,
            attention_mask=None,
            past_key_values=None,
            position_ids=position_ids,
        )
        hidden = self.layers[0](embeds, hidden, mask, self.rotary_emb(embeds, position_ids), position_ids)
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits
