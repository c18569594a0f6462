"""Convert a Hugging Face folder to the format that a peer runs, in that peer's environment.

python benchmarks/peers/convert.py PEER MODEL FORMAT OUT
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def openvino(model: Path, format: str, out: Path) -> None:
    width = {"bfloat16": ["fp16"], "int8": ["int8"], "int4": ["int4", "--group-size", "128"]}[format]
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "-m", str(model)]
    subprocess.run([*command, "--task", "text-generation-with-past", "--weight-format", *width, str(out)], check=True)


def onnxruntime(model: Path, format: str, out: Path) -> None:
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(model), "-o", str(out)]
    subprocess.run([*builder, "-p", format, "-e", "cpu", "-c", str(out) + ".cache"], check=True)


def llama_cpp(model: Path, format: str, out: Path) -> None:
    """Write a GGUF file; Q8_0 and Q4_0 are made by llama.cpp's own quantization of the bfloat16 file."""
    if format == "bf16":
        write_gguf(model, out)
        return
    import llama_cpp as api

    whole = out.with_suffix(".bf16")
    write_gguf(model, whole)
    params = api.llama_model_quantize_default_params()
    params.ftype = {"Q8_0": api.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_0": api.LLAMA_FTYPE_MOSTLY_Q4_0}[format]
    status = api.llama_model_quantize(str(whole).encode(), str(out).encode(), params)
    whole.unlink()
    if status:
        raise SystemExit(f"llama.cpp could not quantize {model} to {format}: status {status}")


def tensors(model: Path) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the tensors of a bfloat16 checkpoint, as [.., 2 * columns] bytes."""
    import numpy as np

    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            start = file.tell()
        data = np.memmap(path, np.uint8, "r", start)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise SystemExit(f"{path}: {name} is {entry['dtype']}, expected BF16")
            first, last = entry["data_offsets"]
            *rows, columns = entry["shape"]
            yield name, data[first:last].reshape(*rows, 2 * columns)


def write_gguf(model: Path, out: Path) -> None:
    """Write a Llama or Qwen3 as GGUF without a vocabulary, because requests consist of token ids."""
    import gguf
    import numpy as np

    config = json.loads((model / "config.json").read_text())
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}[config["model_type"]]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layers, head_dim = config["num_hidden_layers"], config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(arch, layers)
    for name, data in tensors(model):
        if data.ndim == 1:  # norms are float32 in GGUF
            values = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(names.get_name(name, (".weight",)), values)
            continue
        rows = data
        if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            count = heads if "q_proj" in name else kv_heads
            shape = (count, 2, data.shape[0] // count // 2, data.shape[1])
            # GGUF applies RoPE to pairs of neighbouring rows.
            rows = np.ascontiguousarray(data.reshape(shape).swapaxes(1, 2).reshape(data.shape))
        bf16 = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(names.get_name(name, (".weight",)), rows, raw_shape=rows.shape, raw_dtype=bf16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    peer, source, width, target = sys.argv[1:]
    {"openvino": openvino, "onnxruntime": onnxruntime, "llama_cpp": llama_cpp}[peer](Path(source), width, Path(target))
