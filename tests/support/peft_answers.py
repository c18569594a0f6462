"""Save adapters with PEFT itself, and what its models answer: python peft_answers.py MODEL OUT, with PEFT on the path.

OUT gets a folder for each adapter, and answers.json: by adapter the greedy tokens after PROMPT, and their log
probabilities.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

PROMPT = [5, 9, 17, 3, 88, 41]
CONFIGS: dict[str, dict[str, Any]] = {
    "all-linear": {"r": 8, "lora_alpha": 4, "target_modules": "all-linear"},
    "patterns": {
        "r": 4,
        "lora_alpha": 2,
        "use_rslora": True,
        "target_modules": ["q_proj", "down_proj", "embed_tokens"],
        "rank_pattern": {"down_proj": 7},
        "alpha_pattern": {"layers.1.mlp.down_proj": 3},
    },
    "head": {"r": 4, "target_modules": ["v_proj", "lm_head"]},
    "layer": {"r": 2, "lora_alpha": 8, "target_modules": ["k_proj", "up_proj"], "layers_to_transform": [1]},
}


def main() -> None:
    peft = importlib.import_module("peft")

    model, out = sys.argv[1], Path(sys.argv[2])
    answers = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(1)
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        adapted = peft.get_peft_model(
            base, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config)
        ).eval()
        adapted.save_pretrained(out / name)
        ids, logprobs = list(PROMPT), []
        for _ in range(8):
            with torch.inference_mode():
                row = adapted(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            ids.append(int(row.argmax()))
            logprobs.append(float(row.max()))
        answers[name] = {"token_ids": ids[len(PROMPT) :], "logprobs": logprobs}
    (out / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
