"""Train the small models that ship with this repository, from text every Python has.

    python examples/models/train.py prepare           # eval.txt and the tokenizer, under a minute
    python examples/models/train.py train tiny-llama  # then tiny-draft, tiny-moe
    python examples/models/train.py card tiny-llama   # measure again and rewrite the model card

The corpus is the standard library of the Python that runs this script (no tests, no tables):
its sources, the language reference in `pydoc_data`, and short conversations made from the
docstrings. A few modules are held out as `eval.txt` and never trained on. A model sees a fixed
number of tokens, so a run is defined by its seed and its recipe (recipes.py), never by a clock.
"""

import ctypes
import json
import math
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
import typer
from card import encode_plain, perplexity, write_card
from corpus import END, SPECIAL_TOKENS, encode_corpus, read_corpus, train_tokenizer
from recipes import RECIPES, TOKENS_PER_STEP, Recipe
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.integrations.moe import ExpertsInterface
from transformers.utils import logging as transformers_logging

HERE = Path(__file__).resolve().parent
COMPILED_ATTENTION_MAX_LEN = 1024  # for longer sequences the score matrix costs more than the flash kernel

console = Console()
# The mark \b keeps the help formatter from joining the lines of commands.
HELP = (__doc__ or "").replace("\n\n    ", "\n\n\b\n    ")
app = typer.Typer(help=HELP, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def load_tokenizer() -> PreTrainedTokenizerFast:
    folder = HERE / "tiny-llama"
    if not (folder / "tokenizer.json").exists():
        raise typer.BadParameter(f"{folder} has no tokenizer; run `{sys.argv[0]} prepare` first")
    return cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(folder))


def batches(documents: list[np.ndarray], phases: tuple[tuple[int, int], ...], seed: int) -> Iterator[torch.Tensor]:
    """Yield packed ids of shape [TOKENS_PER_STEP / seq_len, seq_len + 1] for each step.

    Each epoch puts the documents end to end in a new order, cuts rows of one sequence length, and shuffles the rows.
    Without shuffling, a step would see little more than one document.
    """
    rng = np.random.default_rng(seed)
    for seq_len, steps in phases:
        rows = np.empty((0, seq_len + 1), dtype=np.int64)
        rows_per_step = TOKENS_PER_STEP // seq_len
        for _ in range(steps):
            if len(rows) < rows_per_step:
                stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
                starts = np.arange(0, len(stream) - seq_len - 1, seq_len)
                cut = stream[starts[:, None] + np.arange(seq_len + 1)]
                rows = np.concatenate([rows, rng.permutation(cut)])
            yield torch.from_numpy(rows[:rows_per_step])
            rows = rows[rows_per_step:]


def keep_freed_memory() -> None:
    """Ask glibc not to return freed activations to the system; otherwise page faults take a third of a step."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        mmap_threshold, trim_threshold = -3, -1
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, 2**31 - 1)


def learning_rate_at(step: int, recipe: Recipe) -> float:
    """Return the learning rate: a linear warm-up over 100 steps, then a cosine down to a fiftieth."""
    if step < 100:
        return recipe.learning_rate * (step + 1) / 100
    progress = (step - 100) / max(1, recipe.num_steps - 100)
    return recipe.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return the nearest matrix with singular values near 1 to each [..., m, n], by five Newton-Schulz steps."""
    x: torch.Tensor = matrix.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    result: torch.Tensor = x.mT if tall else x
    return result.float()


class Muon(torch.optim.Optimizer):
    """An optimizer with orthogonalised Nesterov momentum for the matrices between embedding and logits.

    tiny-llama reaches a held-out loss in about half of the tokens that AdamW alone needs.
    Sources: Jordan et al. 2024, kellerjordan.github.io/posts/muon; the step's scale, which lets it share
    AdamW's learning rate, is from Liu et al. 2025, arXiv:2502.16982.
    """

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.0, "momentum": 0.95, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(average, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-0.2 * group["lr"] * math.sqrt(max(p.shape[-2:])))


def make_optimizers(model: PreTrainedModel) -> tuple[torch.optim.Optimizer, ...]:
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() >= 2 and "embed_tokens" not in name]
    rest = [p for name, p in named if p.dim() < 2 or "embed_tokens" in name]
    return Muon(matrices), torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def all_experts(self: Any, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Run every expert on every token, weighted 0 where the router did not choose it.

    The result is that of the sparse function. It does four times the work in two large matrix products, which on a CPU
    and at this size are faster than the small products of the sparse function.
    """
    num_tokens, num_experts = len(hidden), len(self.gate_up_proj)
    weights = topk_weights.new_zeros(num_tokens, num_experts).scatter(1, topk_ids, topk_weights)
    gate, up = F.linear(hidden, self.gate_up_proj.flatten(0, 1)).view(num_tokens, num_experts, -1).chunk(2, dim=-1)
    activation = F.silu(gate) * up * weights.unsqueeze(-1)
    return F.linear(activation.flatten(1), self.down_proj.transpose(0, 1).flatten(1)).to(hidden.dtype)


def make_loss(model: PreTrainedModel, compiled: bool) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return a function of ids that computes the loss to minimise and its cross-entropy part in nats per token."""
    is_moe = hasattr(model.config, "num_experts")

    def loss(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            options = {"output_router_logits": True} if is_moe else {}
            out = model(input_ids=ids[:, :-1], use_cache=False, **options)
        entropy = F.cross_entropy(out.logits.float().flatten(0, 1), ids[:, 1:].flatten())
        total = entropy + model.config.router_aux_loss_coef * out.aux_loss if is_moe else entropy
        return total, entropy.detach()

    return torch.compile(loss, dynamic=False) if compiled else loss


def train_model(
    name: str, seed: int, compiled: bool, save_every: int, tokenizer: PreTrainedTokenizerFast
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train a model by its recipe; return it in float32 with the record that goes into card.json."""
    recipe = RECIPES[name]
    corpus = read_corpus(seed)
    documents, chat_share = encode_corpus(corpus, tokenizer)
    num_corpus_tokens = sum(map(len, documents))
    held_out_ids = encode_plain(tokenizer, corpus.held_out)
    torch.manual_seed(seed)
    model: PreTrainedModel = cast(Any, AutoModelForCausalLM).from_config(recipe.config(), dtype=torch.float32)
    num_parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"{name}: {num_parameters:,} parameters; {num_corpus_tokens:,} tokens in {corpus.num_files} files "
        f"({chat_share:.0%} chat), {recipe.num_steps * TOKENS_PER_STEP / num_corpus_tokens:.1f} epochs"
    )
    if hasattr(model.config, "num_experts"):
        ExpertsInterface.register("all_experts", all_experts)
        model.set_experts_implementation("all_experts")
    optimizers, loss_fn = make_optimizers(model), make_loss(model, compiled)
    losses: list[float] = []
    held_out: list[tuple[int, float]] = []
    started = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=recipe.num_steps)
        for step, ids in enumerate(batches(documents, recipe.phases, seed)):
            model.set_attn_implementation("eager" if ids.shape[1] <= COMPILED_ATTENTION_MAX_LEN else "sdpa")
            total, entropy = loss_fn(ids)
            torch.autograd.backward(total)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate_at(step, recipe)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(entropy.item())
            progress.update(task, advance=1, description=f"{name} loss {np.mean(losses[-50:]):.3f}")
            if (step + 1) % save_every == 0 or step + 1 == recipe.num_steps:
                held_out.append((step + 1, math.log(perplexity(model, held_out_ids, tokenizer))))
                console.print(f"step {step + 1}: loss {np.mean(losses[-50:]):.3f}, held out {held_out[-1][1]:.3f}")
                save_folder(model, tokenizer, HERE / name)
    record = {
        "model": name,
        "command": f"python examples/models/train.py train {name} --seed {seed}",
        "parameters": num_parameters,
        "minutes": round((time.perf_counter() - started) / 60, 1),
        "training_tokens": recipe.num_steps * TOKENS_PER_STEP,
        "corpus_tokens": num_corpus_tokens,
        "corpus_files": corpus.num_files,
        "chat_share": round(chat_share, 3),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "phases": [list(phase) for phase in recipe.phases],
        "loss_every_10_steps": [round(float(np.mean(losses[i : i + 10])), 4) for i in range(0, len(losses), 10)],
        "held_out_loss": [[step, round(value, 4)] for step, value in held_out],
    }
    return model, record


def save_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights in bfloat16, configs and tokenizer; a reader never sees a half-written file."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    copy: Any = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    copy = copy.to(torch.bfloat16)
    copy.generation_config = cast(Any, GenerationConfig)(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, SPECIAL_TOKENS.index(END)],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,  # such small models repeat themselves if the likeliest token is always taken
        temperature=0.7,
        top_p=0.9,
        repetition_penalty=1.1,
    )
    copy.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    move_files(partial, folder)


def move_files(partial: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in partial.iterdir():
        path.chmod(0o644)
        path.replace(folder / path.name)
    partial.rmdir()


# ---- commands

ModelName = Annotated[str, typer.Argument(help=f"One of {', '.join(RECIPES)}.", metavar="MODEL")]
Seed = Annotated[int, typer.Option(help="Fixes initial weights, document order and conversations.")]


def check_name(name: str) -> None:
    if name not in RECIPES:
        raise typer.BadParameter(f"unknown model {name!r}; one of {', '.join(RECIPES)}")


@app.command()
def prepare(seed: Seed = 0) -> None:
    """Write eval.txt from the held-out modules and train the tokenizer into tiny-llama/."""
    corpus = read_corpus(seed)
    (HERE / "eval.txt").write_text(corpus.held_out, encoding="utf-8")
    with console.status("training the tokenizer"):
        tokenizer = train_tokenizer(corpus.documents)
    partial = HERE / ".tokenizer.partial"
    tokenizer.save_pretrained(partial)
    move_files(partial, HERE / "tiny-llama")
    console.print(
        f"{corpus.num_files} files, {sum(map(len, corpus.documents)):,} characters, "
        f"{len(corpus.conversations):,} conversations, {len(tokenizer)} tokens in the vocabulary"
    )


@app.command()
def train(
    name: ModelName,
    seed: Seed = 0,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints in the model's folder.")] = 200,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Use torch.compile (needs a C++ compiler); 1.3x faster.")
    ] = True,
) -> None:
    """Train a model by its recipe, then write its folder and card."""
    check_name(name)
    torch.set_num_threads(threads)
    keep_freed_memory()
    tokenizer = load_tokenizer()
    model, record = train_model(name, seed, compiled, save_every, tokenizer)
    save_folder(model, tokenizer, HERE / name)
    write_card(HERE / name, record)


@app.command()
def card(name: ModelName, threads: Annotated[int, typer.Option(help="CPU threads.")] = 2) -> None:
    """Measure a trained model again and rewrite its card."""
    check_name(name)
    torch.set_num_threads(threads)
    path = HERE / name / "card.json"
    if not path.exists():
        raise typer.BadParameter(f"{path} is missing; run `{sys.argv[0]} train {name}` first")
    write_card(HERE / name, json.loads(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    cast(Any, transformers_logging).disable_progress_bar()
    app()
