"""Train the small models that ship with this repository, from text every Python has.

    python examples/models/train.py prepare           # eval.txt and the tokenizer, under a minute
    python examples/models/train.py train tiny-llama  # then tiny-draft, tiny-moe
    python examples/models/train.py card tiny-llama   # measure again and rewrite the model card

The corpus is the standard library of the Python that runs this script (no tests, no tables):
its sources, the language reference in `pydoc_data`, and short conversations made from the
docstrings. A few modules are held out as `eval.txt` and never trained on. A model sees a fixed
number of tokens, so a run is defined by its seed and its recipe below, never by a clock.
"""

import ast
import ctypes
import hashlib
import inspect
import json
import math
import platform
import random
import shutil
import sys
import sysconfig
import textwrap
import time
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)
from transformers.integrations.moe import ExpertsInterface
from transformers.utils import logging as transformers_logging

HERE = Path(__file__).resolve().parent
HELD_OUT = (
    "calendar.py", "cmd.py", "fnmatch.py", "graphlib.py", "heapq.py", "json/decoder.py", "sched.py", "shlex.py",
)  # fmt: skip
# Tests are missing from some installations; the other names hold tables rather than text.
SKIPPED_PARTS = {
    "site-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "lib-dynload", "__phello__",
}  # fmt: skip
SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "stringprep", "entities", "_bootsubprocess")

VOCAB_SIZE = 4096
BOS, EOS, PAD, END = "<|bos|>", "<|eos|>", "<|pad|>", "<|end|>"
SPECIAL_TOKENS = [BOS, EOS, PAD, "<|system|>", "<|user|>", "<|assistant|>", END]
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] | trim + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""
# Words keep their leading space, digits come in threes, newlines end a piece: Llama 3's split.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SYSTEM_PROMPT = "You answer questions about the Python standard library."

TOKENS_PER_STEP = 4096
EVAL_WINDOW = 1024
PREFIX_CHARS = 6000  # of eval.txt, for the perplexity that tests recompute in a second
COMPILED_ATTENTION_MAX_LEN = 1024  # above, the score matrix costs more than the flash kernel

console = Console()
# \b keeps the help from joining the lines of commands.
HELP = (__doc__ or "").replace("\n\n    ", "\n\n\b\n    ")
app = typer.Typer(help=HELP, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@dataclass(frozen=True)
class Recipe:
    """How one model is built and trained.

    phases   (sequence length, steps), run in order; every step sees TOKENS_PER_STEP tokens
    """

    config: Callable[[], PreTrainedConfig]
    phases: tuple[tuple[int, int], ...]
    learning_rate: float
    summary: str
    expect: str

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
        phases=((512, 1100), (2048, 130), (4096, 70)),
        learning_rate=3e-3,
        summary="Llama: 6 layers, hidden size 256, 4 heads of 64 over 2 KV heads, tied embeddings",
        expect="It writes text with\nthe look of Python and of docstrings; what it says is seldom right.",
    ),
    "tiny-draft": Recipe(
        config=lambda: llama_config(128, 192, 2, 2, 1),
        phases=((512, 1000), (2048, 120), (4096, 80)),
        learning_rate=3e-3,
        summary="Llama: 2 layers, hidden size 128; the draft model of tiny-llama for speculative decoding",
        expect="It is there to\nguess tiny-llama's next tokens; alone it soon repeats itself.",
    ),
    "tiny-moe": Recipe(
        config=moe_config,
        phases=((512, 520), (2048, 50), (4096, 30)),
        learning_rate=3e-3,
        summary="Qwen3-MoE: 4 layers, hidden size 256, 8 experts of width 192, top 2, tied embeddings",
        expect="It writes text with\nthe look of Python; what it says is seldom right.",
    ),
}


# ---- corpus


@dataclass(frozen=True)
class Corpus:
    documents: list[str]
    conversations: list[list[dict[str, str]]]
    held_out: str
    num_files: int


def stdlib_files() -> Iterator[tuple[str, Path]]:
    """Relative name and path of every source file used, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    for name, path in sorted(files.items()):
        parts = name.split("/")
        if not SKIPPED_PARTS.intersection(parts) and not any(part.startswith(SKIPPED_PREFIXES) for part in parts):
            yield name, path


def read_corpus(seed: int) -> Corpus:
    documents: list[str] = []
    conversations: list[list[dict[str, str]]] = []
    held_out: list[str] = []
    rng = random.Random(seed)
    num_files = 0
    for name, path in stdlib_files():
        with tokenize.open(path) as file:
            text = file.read()
        if len(text) < 200:
            continue
        num_files += 1
        if name in HELD_OUT:
            held_out.append(text)
        elif name == "pydoc_data/topics.py":
            documents.extend(topics(text))
        else:
            documents.append(text)
            module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            conversations.extend(conversations_about(module, text, rng))
    return Corpus(documents, conversations, "\n\n".join(held_out), num_files)


def topics(source: str) -> list[str]:
    """The language reference's sections: the values of the dictionary in pydoc_data/topics.py."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return [text for text in ast.literal_eval(node.value).values() if len(text) > 200]
    return []


def conversations_about(module: str, source: str, rng: random.Random) -> Iterator[list[dict[str, str]]]:
    """One short conversation for each public, documented module, class and function."""
    tree = ast.parse(source)
    summary = first_paragraph(tree)
    if summary:
        yield conversation([(f"What is the `{module}` module for?", summary)], rng)
    stack: list[tuple[str, ast.AST]] = [(module, tree)]
    while stack:
        prefix, parent = stack.pop(0)
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
                continue
            name = f"{prefix}.{node.name}"
            if isinstance(node, ast.ClassDef):
                stack.append((name, node))
            summary = first_paragraph(node)
            if not summary:
                continue
            question = rng.choice((f"What does `{name}` do?", f"Explain `{name}`.", f"What is `{name}` for?"))
            turns = [(question, summary)]
            if isinstance(node, ast.FunctionDef):
                code = textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")
                if rng.random() < 0.4:
                    call = f"{name}({ast.unparse(node.args)})"
                    turns.append(("How do I call it?", f"```python\n{call}\n```"))
                if code and len(code) < 1200 and rng.random() < 0.3:
                    turns.append(("Show me its code.", f"```python\n{code}\n```"))
            yield conversation(turns, rng)


def first_paragraph(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    """The first paragraph of a docstring on one line; empty if missing or of no use as an answer."""
    docstring = inspect.cleandoc(ast.get_docstring(node) or "")
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return paragraph if 20 <= len(paragraph) <= 600 else ""


def conversation(turns: list[tuple[str, str]], rng: random.Random) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": SYSTEM_PROMPT}] if rng.random() < 0.3 else []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


# ---- tokenizer


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    bos_id = SPECIAL_TOKENS.index(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos_id)]
    )
    wrapped: PreTrainedTokenizerFast = cast(Any, PreTrainedTokenizerFast)(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=SPECIAL_TOKENS[3:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    return wrapped


def load_tokenizer() -> PreTrainedTokenizerFast:
    folder = HERE / "tiny-llama"
    if not (folder / "tokenizer.json").exists():
        raise typer.BadParameter(f"{folder} has no tokenizer; run `{sys.argv[0]} prepare` first")
    return cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(folder))


def encode_corpus(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> tuple[list[np.ndarray], float]:
    """One array of ids a document or conversation, and the share of tokens in conversations."""
    backend = tokenizer.backend_tokenizer
    bos, eos = cast(int, tokenizer.bos_token_id), cast(int, tokenizer.eos_token_id)
    texts = [[bos, *e.ids, eos] for e in backend.encode_batch(corpus.documents, add_special_tokens=False)]
    chats = cast(list[str], [tokenizer.apply_chat_template(c, tokenize=False) for c in corpus.conversations])
    chat_ids = [e.ids for e in backend.encode_batch(chats, add_special_tokens=False)]
    num_text, num_chat = sum(map(len, texts)), sum(map(len, chat_ids))
    return [np.array(ids, dtype=np.int64) for ids in texts + chat_ids], num_chat / (num_text + num_chat)


# ---- training


def batches(documents: list[np.ndarray], phases: tuple[tuple[int, int], ...], seed: int) -> Iterator[torch.Tensor]:
    """Packed ids, [TOKENS_PER_STEP / seq_len, seq_len + 1] a step.

    Each epoch puts the documents end to end in a new order, cuts rows of one sequence length, and
    shuffles the rows: without that, a step would see little more than one document.
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
    """Ask glibc not to return freed activations to the system: a third of a step was page faults."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        mmap_threshold, trim_threshold = -3, -1
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, 2**31 - 1)


def learning_rate_at(step: int, recipe: Recipe) -> float:
    """Linear warm-up over 100 steps, then a cosine down to a fiftieth."""
    if step < 100:
        return recipe.learning_rate * (step + 1) / 100
    progress = (step - 100) / max(1, recipe.num_steps - 100)
    return recipe.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest matrix with singular values near 1, of each [..., m, n], by five Newton-Schulz steps."""
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
    """Orthogonalised Nesterov momentum for the matrices between embedding and logits.

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
    """Every expert on every token, weighted 0 where the router did not choose it.

    The same function as the sparse one. It does four times the work in two large matrix products,
    which on a CPU and at this size are faster than the sparse one's small pieces.
    """
    num_tokens, num_experts = len(hidden), len(self.gate_up_proj)
    weights = topk_weights.new_zeros(num_tokens, num_experts).scatter(1, topk_ids, topk_weights)
    gate, up = F.linear(hidden, self.gate_up_proj.flatten(0, 1)).view(num_tokens, num_experts, -1).chunk(2, dim=-1)
    activation = F.silu(gate) * up * weights.unsqueeze(-1)
    return F.linear(activation.flatten(1), self.down_proj.transpose(0, 1).flatten(1)).to(hidden.dtype)


def make_loss(model: PreTrainedModel, compiled: bool) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """ids -> (the loss to minimise, its cross-entropy part in nats per token)."""
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
    """Run the recipe; returns the model in float32 and the record that goes into card.json."""
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
    """Write weights in bfloat16, configs and tokenizer; a reader never sees half of a folder's file."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    copy: Any = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    copy = copy.to(torch.bfloat16)
    copy.generation_config = cast(Any, GenerationConfig)(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, SPECIAL_TOKENS.index(END)],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
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


# ---- measuring


def encode_plain(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def load_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return cast(PreTrainedModel, model.eval())


@torch.no_grad()
def perplexity(model: PreTrainedModel, ids: list[int], tokenizer: PreTrainedTokenizerFast) -> float:
    """exp of the mean negative log-likelihood of `ids`, each predicted exactly once.

    The ids, without special tokens, are cut into windows of EVAL_WINDOW that do not overlap (the
    last may be shorter). A window's input is BOS and all but its last token, so nothing carries
    over from one window to the next and no token goes unpredicted. Softmax is in float32.
    """
    total = 0.0
    for start in range(0, len(ids), EVAL_WINDOW):
        window = ids[start : start + EVAL_WINDOW]
        logits = model(input_ids=torch.tensor([[tokenizer.bos_token_id, *window[:-1]]]), use_cache=False).logits
        total += F.cross_entropy(logits[0].float(), torch.tensor(window), reduction="sum").item()
    return math.exp(total / len(ids))


def measure(folder: Path) -> dict[str, Any]:
    """Perplexities of the saved weights, computed in float32 and in bfloat16, and the files' sizes."""
    text = (HERE / "eval.txt").read_text(encoding="utf-8")
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


def write_samples(folder: Path) -> list[tuple[str, str]]:
    """(prompt, continuation) pairs: two of code, sampled, and two of chat, greedy."""
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


# ---- model card


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


def write_card(name: str, record: dict[str, Any]) -> None:
    """README.md, card.json and loss.png of a model folder."""
    folder, recipe = HERE / name, RECIPES[name]
    record = record | measure(folder)
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

## Training

- **Data**: the standard library of Python {record["python"]} ({record["corpus_files"]} files without tests and tables,
  {record["corpus_tokens"]:,} tokens), with the language reference from `pydoc_data`; {record["chat_share"]:.0%} of the tokens
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
    write_card(name, record)


@app.command()
def card(name: ModelName, threads: Annotated[int, typer.Option(help="CPU threads.")] = 2) -> None:
    """Measure a trained model again and rewrite its card."""
    check_name(name)
    torch.set_num_threads(threads)
    path = HERE / name / "card.json"
    if not path.exists():
        raise typer.BadParameter(f"{path} is missing; run `{sys.argv[0]} train {name}` first")
    write_card(name, json.loads(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    cast(Any, transformers_logging).disable_progress_bar()
    app()
