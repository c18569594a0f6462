"""The MTP layer of a model's own checkpoint as a PyTorch module: transformers' own, over one row of the model a token.

Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.2. The layer is a decoder layer of the model's family. A row
stands for the token at position p + 1, beside what the model made of the tokens up to p, behind its last norm. What the
layer makes of a row, behind a norm of its own, goes through the model's LM head, and takes the place of the model's row
when the layer goes on with a token of its own. So `hidden_in` has either, in the same columns.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import MtpModel

from inferc.frontend.model_class import causal_class


class MtpHead(MtpModel):  # type: ignore[misc]
    """The first MTP layer of a model, with the model's embedding and LM head.

    Its config is the one that `get_mtp_config` makes of the model's, with `first_mtp_layer`: the number that the layer
    has in the checkpoint.
    """

    base_model_prefix = ""

    def __init__(self, config: Any) -> None:
        super().__init__(_model_of(config), 1)
        self.hidden_width = int(config.hidden_size)

    def tie_with_main_model(self, main_model: Any) -> None:
        """Make modules like those that the model shares with its MTP layers."""
        embedding, lm_head = main_model.get_input_embeddings(), main_model.get_output_embeddings()
        self.embed_tokens = nn.Embedding(*embedding.weight.shape)
        self.shared_head = nn.Linear(lm_head.in_features, lm_head.out_features, bias=lm_head.bias is not None)
        self._family = (main_model,)  # in a tuple, as it is no part of this module
        rotary = getattr(main_model.get_decoder(), "rotary_emb", None)
        self.rotary_emb = None if rotary is None else type(rotary)(config=self.config)

    def _init_weights(self, module: nn.Module) -> None:
        self._family[0]._init_weights(module)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.shared_head

    def weight_conversions(self) -> list[Any]:
        """Return what turns the checkpoint's names into this module's: transformers' own, and the layer's number."""
        number = self.config.first_mtp_layer
        return [
            WeightRenaming(source_patterns=f"layers.{number}.", target_patterns="layers.0.mtp_block."),
            *get_checkpoint_conversion_mapping("MtpModel"),
            *get_model_conversion_mapping(self._family[0]),
        ]

    def forward(self, input_ids: Tensor, position_ids: Tensor, hidden_in: Tensor) -> Tensor:
        """Return the logits [1, T, vocab_size] of the tokens that follow `input_ids` [1, T]."""
        rows = self.forward_layer(0, hidden_in, position_ids, None, input_ids=input_ids)
        logits: Tensor = self._project_to_logits(rows)
        return logits


def _model_of(config: Any) -> Any:
    """Return the model of the config's family, without memory for its weights: classes and sizes are read off it."""
    kind = causal_class(config)
    assert kind is not None, "the model itself was loaded"
    with torch.device("meta"):
        return kind(copy.deepcopy(config))
