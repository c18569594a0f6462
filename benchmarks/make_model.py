"""Write a Hugging Face model folder of a real shape with random weights.

    python benchmarks/make_model.py --list
    python benchmarks/make_model.py qwen3-0.6b out/qwen3-0.6b
    python benchmarks/make_model.py llama-3.1-8b out/two-layers --layers 2

Speed and memory depend on shapes, not on the values of the weights, so benchmarks need no download. Configs have the
values of the published checkpoints. Weights are normal with standard deviation 0.02, divided by sqrt(2 * layers) where
they write to the residual stream; norm weights vary around 1, so that a misplaced norm changes the output. Tensors are
written one at a time: the largest model needs a few hundred MB of memory. The tokenizer and its special token ids are
those of examples/models/tiny-llama, with 4096 tokens; the vocabulary size is the real one, so a random model also
produces ids that decode to nothing. With --sparse every weight is 0 and no disk is used, for benchmarks that do not
depend on the values, such as the cost of a compile.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

TOKENIZER = Path(__file__).resolve().parents[1] / "examples" / "models" / "tiny-llama"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
DTYPES = {"bfloat16": (torch.bfloat16, "BF16"), "float16": (torch.float16, "F16"), "float32": (torch.float32, "F32")}
MAX_SHARD_BYTES = 2_000_000_000
# Number of elements drawn at once, so that an embedding of 500 M elements needs no buffer of 2 GB.
CHUNK_ELEMENTS = 1 << 24
STD = 0.02

Config = dict[str, Any]


def llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **rest: Any) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "initializer_range": STD,
        "attention_bias": False,
        "attention_dropout": 0.0,
        **rest,
    }


def llama3(*shape: int, factor: float, tied: bool) -> Config:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return llama(
        *shape,
        mlp_bias=False,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=scaling,
        tie_word_embeddings=tied,
    )


def mistral(*shape: int, **rest: Any) -> Config:
    common: Config = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
    return llama(*shape, **(common | rest))


def mixtral(*shape: int) -> Config:
    return mistral(
        *shape,
        architectures=["MixtralForCausalLM"],
        model_type="mixtral",
        num_local_experts=8,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.02,
        output_router_logits=False,
    )


def qwen(*shape: int, **rest: Any) -> Config:
    common: Config = {
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
    }
    return llama(*shape, **(common | rest))


def qwen2(*shape: int, **rest: Any) -> Config:
    common: Config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768}
    config = qwen(*shape, **(common | rest))
    del config["attention_bias"]  # Q, K and V always have a bias in this family
    return config


def qwen3(*shape: int, **rest: Any) -> Config:
    common: Config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
    return qwen(*shape, **(common | rest))


def qwen3_moe(*shape: int, experts: int) -> Config:
    return qwen3(
        *shape,
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        moe_intermediate_size=768,
        num_experts=experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=0.001,
        output_router_logits=False,
        tie_word_embeddings=False,
    )


@dataclass(frozen=True)
class Shape:
    config: Config
    note: str = ""


# hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads
SHAPES = {
    "qwen2.5-0.5b": Shape(qwen2(896, 4864, 24, 14, 2), "q, k, v biases"),
    "qwen3-0.6b": Shape(qwen3(1024, 3072, 28, 16, 8), "q and k norms, head_dim 128"),
    "qwen3-1.7b": Shape(qwen3(2048, 6144, 28, 16, 8)),
    "qwen3-8b": Shape(qwen3(4096, 12288, 36, 32, 8, tie_word_embeddings=False)),
    "llama-3.2-1b": Shape(llama3(2048, 8192, 16, 32, 8, factor=32.0, tied=True), "llama3 rope scaling"),
    "llama-3.2-3b": Shape(llama3(3072, 8192, 28, 24, 8, factor=32.0, tied=True)),
    "llama-3.1-8b": Shape(llama3(4096, 14336, 32, 32, 8, factor=8.0, tied=False)),
    "llama-3.1-70b": Shape(llama3(8192, 28672, 80, 64, 8, factor=8.0, tied=False)),
    "mistral-7b": Shape(mistral(4096, 14336, 32, 32, 8, vocab_size=32768), "v0.3, no sliding window"),
    "mistral-7b-v0.1": Shape(
        mistral(4096, 14336, 32, 32, 8, rope_theta=10000.0, sliding_window=4096), "sliding window of 4096"
    ),
    "qwen3-moe-small": Shape(
        qwen3_moe(2048, 6144, 8, 32, 4, experts=32), "Qwen3-30B-A3B with 8 of 48 layers, 32 of 128 experts"
    ),
    "qwen3-30b-a3b": Shape(qwen3_moe(2048, 6144, 48, 32, 4, experts=128), "128 experts, top 8"),
    "mixtral-small": Shape(mixtral(1024, 3584, 8, 8, 2), "Mixtral 8x7B, a quarter of each width, 8 of 32 layers"),
    "mixtral-8x7b": Shape(mixtral(4096, 14336, 32, 32, 8), "8 experts, top 2"),
}


@dataclass(frozen=True)
class Weight:
    """A tensor of a checkpoint, with the mean and standard deviation of its elements."""

    name: str
    shape: tuple[int, ...]
    mean: float = 0.0
    std: float = STD

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def weights_of(config: Config) -> Iterator[Weight]:
    """Yield every tensor of the checkpoint, with the names of published checkpoints."""
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    yield Weight("model.embed_tokens.weight", (vocab, hidden))
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        yield norm(prefix + "input_layernorm.weight", hidden)
        yield from attention_weights(prefix + "self_attn.", config)
        yield norm(prefix + "post_attention_layernorm.weight", hidden)
        yield from feed_forward_weights(prefix, config)
    yield norm("model.norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        yield Weight("lm_head.weight", (vocab, hidden))


def norm(name: str, size: int) -> Weight:
    return Weight(name, (size,), mean=1.0, std=0.1)


def residual_std(config: Config) -> float:
    return STD / math.sqrt(2 * float(config["num_hidden_layers"]))


def attention_weights(prefix: str, config: Config) -> Iterator[Weight]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    query_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    for name, size in (("q", query_size), ("k", kv_size), ("v", kv_size)):
        yield Weight(f"{prefix}{name}_proj.weight", (size, hidden))
        if config["model_type"] == "qwen2":
            yield Weight(f"{prefix}{name}_proj.bias", (size,))
    yield Weight(prefix + "o_proj.weight", (hidden, query_size), std=residual_std(config))
    if config["model_type"].startswith("qwen3"):
        yield norm(prefix + "q_norm.weight", head_dim)
        yield norm(prefix + "k_norm.weight", head_dim)


def feed_forward_weights(prefix: str, config: Config) -> Iterator[Weight]:
    hidden, std = config["hidden_size"], residual_std(config)
    gate, down, up, width = "gate_proj", "down_proj", "up_proj", config["intermediate_size"]
    groups = [prefix + "mlp."]
    if config["model_type"] == "mixtral":
        prefix += "block_sparse_moe."
        gate, down, up = "w1", "w2", "w3"
        groups = [f"{prefix}experts.{i}." for i in range(config["num_local_experts"])]
    elif config["model_type"] == "qwen3_moe":
        prefix, width = prefix + "mlp.", config["moe_intermediate_size"]
        groups = [f"{prefix}experts.{i}." for i in range(config["num_experts"])]
    if config["model_type"] in ("mixtral", "qwen3_moe"):
        yield Weight(prefix + "gate.weight", (len(groups), hidden))
    for group in groups:
        yield Weight(f"{group}{gate}.weight", (width, hidden))
        yield Weight(f"{group}{up}.weight", (width, hidden))
        yield Weight(f"{group}{down}.weight", (hidden, width), std=std)


def split_shards(weights: list[Weight], element_size: int) -> list[list[Weight]]:
    """Split weights into consecutive shards of at most MAX_SHARD_BYTES; a larger tensor gets its own shard."""
    shards: list[list[Weight]] = [[]]
    num_bytes = 0
    for weight in weights:
        size = weight.num_elements * element_size
        if shards[-1] and num_bytes + size > MAX_SHARD_BYTES:
            shards.append([])
            num_bytes = 0
        shards[-1].append(weight)
        num_bytes += size
    return shards


def write_weight(file: BinaryIO, weight: Weight, dtype: torch.dtype, seed: int) -> Iterator[int]:
    """Draw and write one tensor in chunks, and yield the bytes written by each.

    The seed is mixed with the name, so that a tensor is the same whatever else is written.
    """
    digest = hashlib.sha256(f"{seed}:{weight.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    for start in range(0, weight.num_elements, CHUNK_ELEMENTS):
        size = min(CHUNK_ELEMENTS, weight.num_elements - start)
        values = torch.empty(size).normal_(weight.mean, weight.std, generator=generator)
        yield file.write(values.to(dtype).view(torch.uint8).numpy().data)


def write_shard(path: Path, weights: list[Weight], dtype_name: str, seed: int | None) -> Iterator[int]:
    """Write a safetensors file: header size (u64), a JSON header padded to 8 bytes, then the data.

    Without a seed the data is a hole in a sparse file.
    """
    dtype, code = DTYPES[dtype_name]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for weight in weights:
        end = offset + weight.num_elements * dtype.itemsize
        header[weight.name] = {"dtype": code, "shape": list(weight.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        if seed is None:
            yield file.truncate(8 + len(encoded) + offset)
            return
        for weight in weights:
            yield from write_weight(file, weight, dtype, seed)


def write_weights(folder: Path, weights: list[Weight], dtype_name: str, seed: int | None) -> Iterator[int]:
    element_size = DTYPES[dtype_name][0].itemsize
    shards = split_shards(weights, element_size)
    if len(shards) == 1:
        yield from write_shard(folder / "model.safetensors", weights, dtype_name, seed)
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys((weight.name for weight in shard), name)
        yield from write_shard(folder / name, shard, dtype_name, seed)
    total_size = sum(weight.num_elements for weight in weights) * element_size
    write_json(
        folder / "model.safetensors.index.json", {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    )


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_configs(folder: Path, config: Config, dtype_name: str) -> None:
    for name in TOKENIZER_FILES:
        shutil.copyfile(TOKENIZER / name, folder / name)
    special = json.loads((TOKENIZER / "generation_config.json").read_text(encoding="utf-8"))
    ids = {key: special[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "config.json", config | ids | {"torch_dtype": dtype_name, "use_cache": True})
    write_json(folder / "generation_config.json", ids | {"do_sample": False})


def make_model(shape: str, out: Path, layers: int | None, seed: int | None, dtype_name: str, console: Console) -> None:
    """Write the folder under a temporary name next to `out`, then rename it; without a seed the weights are holes."""
    config = SHAPES[shape].config | ({} if layers is None else {"num_hidden_layers": layers})
    weights = list(weights_of(config))
    total = sum(weight.num_elements for weight in weights) * DTYPES[dtype_name][0].itemsize
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write_configs(partial, config, dtype_name)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(shape, total=total)
            for num_bytes in write_weights(partial, weights, dtype_name, seed):
                progress.advance(task, num_bytes)
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def print_shapes(console: Console) -> None:
    numbers = ("parameters", "bfloat16", "layers")
    columns = (Column("shape", no_wrap=True), *(Column(name, justify="right", no_wrap=True) for name in numbers))
    table = Table(*columns, Column("note"), box=None)
    for name, shape in SHAPES.items():
        num_parameters = sum(weight.num_elements for weight in weights_of(shape.config))
        table.add_row(
            name,
            f"{num_parameters / 1e9:.3f} B",
            f"{2 * num_parameters / 1e9:.2f} GB",
            str(shape.config["num_hidden_layers"]),
            shape.note,
        )
    console.print(table)


def fail(message: str) -> NoReturn:
    typer.echo(f"make_model: {message}", err=True)
    raise typer.Exit(2)


# The mark \b keeps the help formatter from joining the lines of commands.
HELP = (__doc__ or "").replace("\n\n    ", "\n\n\b\n    ")
app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=HELP)
def main(
    shape: Annotated[str | None, typer.Argument(help="A name from --list.", metavar="SHAPE")] = None,
    out: Annotated[Path | None, typer.Argument(help="The folder to write.", metavar="OUT")] = None,
    layers: Annotated[int | None, typer.Option(help="Write this many layers instead of the real number.")] = None,
    seed: Annotated[int, typer.Option(help="Fixes every weight.")] = 0,
    sparse: Annotated[bool, typer.Option("--sparse", help="All weights 0, in files that take no disk.")] = False,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bfloat16",
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    list_shapes: Annotated[bool, typer.Option("--list", help="Print the known shapes and their sizes.")] = False,
) -> None:
    if list_shapes:
        print_shapes(Console())
        return
    if shape is None or out is None:
        fail("SHAPE and OUT are both needed; --list prints the shapes")
    if shape not in SHAPES:
        fail(f"unknown shape {shape!r}; one of {', '.join(SHAPES)}")
    if dtype not in DTYPES:
        fail(f"unknown dtype {dtype!r}; one of {', '.join(DTYPES)}")
    if layers is not None and layers < 1:
        fail(f"--layers is {layers}; give 1 or more")
    if out.exists() and not force:
        fail(f"{out} exists; give another folder, or --force to replace it")
    if out.exists() and not (out.is_dir() and (out / "config.json").exists() or is_empty_folder(out)):
        fail(f"{out} is not a model folder (no config.json); --force replaces only those")
    missing = [name for name in (*TOKENIZER_FILES, "generation_config.json") if not (TOKENIZER / name).exists()]
    if missing:
        fail(f"{TOKENIZER} has no {missing[0]}; it is part of the repository, restore it first")
    try:
        make_model(shape, out, layers, None if sparse else seed, dtype, Console(stderr=True))
    except OSError as error:
        fail(f"cannot write {out}: {error.strerror or error}")
    typer.echo(f"wrote {out}")


def is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


if __name__ == "__main__":
    app()
