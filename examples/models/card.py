"""Measure a trained model on eval.txt and write its card: README.md, card.json, loss.png."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from corpus import BOS, HELD_OUT, VOCAB_SIZE
from recipes import RECIPES, TOKENS_PER_STEP
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

EVAL_WINDOW = 1024
PREFIX_CHARS = 6000  # length of the part of eval.txt whose perplexity tests recompute in a second


def encode_plain(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def load_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return cast(PreTrainedModel, model.eval())


@torch.no_grad()
def perplexity(model: PreTrainedModel, ids: list[int], tokenizer: PreTrainedTokenizerFast) -> float:
    """Return the perplexity of `ids`: exp of the mean negative log-likelihood, each id predicted exactly once.

    The ids, without special tokens, are cut into windows of EVAL_WINDOW that do not overlap (the last may be shorter).
    The input of a window is BOS and all but its last token, so nothing carries over from one window to the next and no
    token goes unpredicted. Softmax is in float32.
    """
    total = 0.0
    for start in range(0, len(ids), EVAL_WINDOW):
        window = ids[start : start + EVAL_WINDOW]
        logits = model(input_ids=torch.tensor([[tokenizer.bos_token_id, *window[:-1]]]), use_cache=False).logits
        total += F.cross_entropy(logits[0].float(), torch.tensor(window), reduction="sum").item()
    return math.exp(total / len(ids))


def measure(folder: Path) -> dict[str, Any]:
    """Measure the perplexity of the saved weights in float32 and in bfloat16, and the sizes of the files."""
    text = (folder.parent / "eval.txt").read_text(encoding="utf-8")
    tokenizer = cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(folder))
    ids = encode_plain(tokenizer, text)
    result: dict[str, Any] = {
        "eval_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "eval_bytes": len(text.encode()),
        "eval_tokens": len(ids),
        "prefix_chars": PREFIX_CHARS,
        "model_bytes": (folder / "model.safetensors").stat().st_size,
    }
    prefix_ids = encode_plain(tokenizer, text[:PREFIX_CHARS])
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(folder, dtype)
        label = str(dtype).removeprefix("torch.")
        result[f"perplexity_{label}"] = round(perplexity(model, ids, tokenizer), 4)
        result[f"prefix_perplexity_{label}"] = round(perplexity(model, prefix_ids, tokenizer), 4)
    return result


@torch.no_grad()
def measure_draft(draft: Path, target: Path) -> dict[str, float]:
    """Measure how well a draft model guesses its target on eval.txt, in float32, over the windows of `perplexity`.

    top1: share of positions with the same most likely token. acceptance: the mean of sum(min(p, q)), the chance that
    speculative sampling keeps a drafted token. Source: Leviathan et al. 2023, arXiv:2211.17192, section 3.
    """
    tokenizer = cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(draft))
    ids = encode_plain(tokenizer, (draft.parent / "eval.txt").read_text(encoding="utf-8"))
    models = [load_model(folder, torch.float32) for folder in (draft, target)]
    same = accepted = 0.0
    count = 0
    for start in range(0, len(ids), EVAL_WINDOW):
        inputs = torch.tensor([[tokenizer.bos_token_id, *ids[start : start + EVAL_WINDOW - 1]]])
        q, p = (model(input_ids=inputs, use_cache=False).logits[0].softmax(-1) for model in models)
        count += inputs.shape[1]
        same += float((q.argmax(-1) == p.argmax(-1)).sum())
        accepted += float(torch.minimum(p, q).sum())
    return {"draft_top1": round(same / count, 4), "draft_acceptance": round(accepted / count, 4)}


def write_samples(folder: Path) -> list[tuple[str, str]]:
    """Generate (prompt, continuation) pairs: two of code, sampled, and two of chat, greedy."""
    tokenizer = cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(folder))
    model: Any = load_model(folder, torch.float32)
    torch.manual_seed(0)
    samples = []
    prompts = [
        ("def read_lines(path):\n    ", True),
        ('"""This module provides', True),
        ("What does `textwrap.dedent` do?", False),
        ("What is the `zipfile` module for?", False),
    ]
    for prompt, is_code in prompts:
        text = BOS + prompt
        if not is_code:
            messages = [{"role": "user", "content": prompt}]
            text = cast(str, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        ids = torch.tensor([encode_plain(tokenizer, text)])
        sampling: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_p": 0.9} if is_code else {}
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=120 if is_code else 80, **sampling
        )
        samples.append((prompt, str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))))
    return samples


def plot_losses(record: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    values = record["loss_every_10_steps"]
    figure, axes = plt.subplots(figsize=(6, 3.2))
    axes.plot([10 * i + 5 for i in range(len(values))], values, linewidth=1, label="training")
    steps, held_out = zip(*record["held_out_loss"], strict=True)
    axes.plot(steps, held_out, "o-", markersize=3, label="eval.txt")
    axes.set(xlabel="step", ylabel="nats per token", title=record["model"])
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def write_card(folder: Path, record: dict[str, Any]) -> None:
    """Write README.md, card.json and loss.png of a model folder, which is named like its recipe."""
    name, recipe = folder.name, RECIPES[folder.name]
    record = record | measure(folder)
    draft = ""
    if recipe.target is not None:
        record |= measure_draft(folder, folder.parent / recipe.target)
        draft = f"""
On the same windows its most likely token is {recipe.target}'s at {record["draft_top1"]:.1%} of the positions, \
and speculative
sampling would keep a drafted token with probability {record["draft_acceptance"]:.2f} \
(the mean of sum(min(p, q)) at temperature 1).
"""
    (folder / "card.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    plot_losses(record, folder / "loss.png")
    samples = "\n\n".join(
        f"`{prompt!r}`\n\n````\n{text.strip(chr(10))}\n````" for prompt, text in write_samples(folder)
    )
    phases = ", then ".join(
        f"{steps} steps of {TOKENS_PER_STEP // length} x {length}" for length, steps in recipe.phases
    )
    (folder / "README.md").write_text(
        f"""# {name}

{recipe.summary}.
{record["parameters"]:,} parameters, vocabulary {VOCAB_SIZE}, context 4096, bfloat16. It is small enough to live in this
repository, so that every example and test runs on a real trained model without a download. {recipe.expect}

| perplexity on [eval.txt](../eval.txt) | saved weights, computed in |
|---|---|
| **{record["perplexity_float32"]:.3f}** | float32 |
| **{record["perplexity_bfloat16"]:.3f}** | bfloat16 |

Convention: `eval.txt` ({record["eval_tokens"]:,} tokens) is cut into windows of {EVAL_WINDOW} tokens that do not
overlap; a window's input is `{BOS}` followed by all but its last token, so every token is predicted
exactly once; perplexity is exp of the mean negative log-likelihood in nats.
{draft}
## Training

- **Data**: the standard library of Python {record["python"]} ({record["corpus_files"]} files without tests and tables,
  {record["corpus_tokens"]:,} tokens), with the language reference from `pydoc_data`; \
{record["chat_share"]:.0%} of the tokens
  are conversations made from its docstrings.
- **Held out** for `eval.txt`: {", ".join(f"`{f}`" for f in HELD_OUT)}.
- **Command**: `{record["command"]}` after `python examples/models/train.py prepare`
- **Budget**: {record["training_tokens"]:,} tokens in {recipe.num_steps} steps: {phases}
- **Optimizer**: Muon for the matrices, AdamW for embedding and norms, peak learning rate {recipe.learning_rate:g},
  cosine, bfloat16 autocast
- **Time**: {record["minutes"]:.0f} minutes by the clock, pauses included, on 2 CPU cores shared with other work
- **Licence of the data**: PSF License Version 2.

![training and held-out loss](loss.png)

## What it writes

The first two are sampled at temperature 0.7, the others are greedy answers in the chat format.

{samples}
""",
        encoding="utf-8",
    )
