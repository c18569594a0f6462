"""A minimal version of inferc in one file: a Hugging Face folder becomes a graph, an artifact, and ten tokens.

python examples/line.py [MODEL] [OUT] [PROMPT]. Read it from top to bottom; each step names its full-size folder.
"""

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, ops

from inferc import extend

aten = ops.aten
TINY_LLAMA = Path(__file__).parent / "models" / "tiny-llama"
NUM_TOKENS = 10

# ----------------------------------------------------------------------------------------------------------------------
# Passes (passes/): each pass edits the graph and returns the number of edits. A `Rewrite` replaces a pattern by one op.
# Here the pattern is RMSNorm, which model code spells as seven ops that each read and write all activations.


def spelled_out(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    variance = aten.mean.dim(aten.pow.Tensor_Scalar(x, 2), [-1], True)
    out: Tensor = aten.mul.Tensor(aten.mul.Tensor(x, aten.rsqrt.default(aten.add.Tensor(variance, eps))), weight)
    return out


def one_op(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ops.inferc.rms_norm.default(x, weight, eps)  # type: ignore[no-any-return]


fuse_rms_norm = extend.Rewrite("fuse_rms_norm", spelled_out, one_op)


class LastRow:
    """A pass that computes logits for the last token alone; a pass without a pattern is plain torch.fx."""

    name = "last_row"

    def __call__(self, program: extend.Program) -> int:
        head = next(node for node in reversed(program.graph.nodes) if node.target == aten.linear.default)
        with program.graph.inserting_before(head):
            last = program.graph.call_function(aten.slice.Tensor, (head.args[0], 1, -1, 2**63 - 1))
        head.replace_input_with(head.all_input_nodes[0], last)
        nodes = list(program.graph.nodes)
        extend.infer_types(program, nodes[nodes.index(last) : -1])  # passes read the type of every node
        return 1


PASSES = (extend.Canonicalise(), fuse_rms_norm, LastRow())

# ----------------------------------------------------------------------------------------------------------------------
# A kernel (codegen/cpp/kernels) runs the op above. inferc has one for every op, and its calls between them are C++ too.

KERNEL = """
#include <cmath>
extern "C" void rms_norm(const float* x, const float* weight, float* out, long rows, long width, float eps) {
  for (long row = 0; row < rows; ++row, x += width, out += width) {
    float sum = 0;
    for (long i = 0; i < width; ++i) sum += x[i] * x[i];
    const float scale = 1 / std::sqrt(sum / float(width) + eps);
    for (long i = 0; i < width; ++i) out[i] = x[i] * scale * weight[i];
  }
}
"""


# ----------------------------------------------------------------------------------------------------------------------
# Compile (src/inferc/compiler): capture, passes, artifact. The artifact does not depend on transformers.


def compile_model(model: Path, out: Path) -> None:
    checkpoint = extend.load_checkpoint(model)
    program = extend.capture(checkpoint, "float32")  # torch.export on the meta device: no weight is read yet
    print(f"captured: {count(program)} nodes, weights still in {model.name}")
    for each in PASSES:
        print(f"{each.name}: {each(program)} rewrites, {count(program)} nodes")
    program.drop_unused()
    out.mkdir(parents=True, exist_ok=True)
    (out / "graph.txt").write_text(program.to_text())  # for people
    (out / "program.json").write_text(json.dumps(extend.to_json(program)))  # for the runtime
    reader = checkpoint.reader
    weights = {name: extend.read_whole(each, reader).contiguous() for name, each in program.weights.items()}
    save_file(weights, out / "weights.safetensors")
    (out / "kernel.cpp").write_text(KERNEL)
    subprocess.run(["g++", "-O3", "-shared", "-fPIC", out / "kernel.cpp", "-o", out / "kernel.so"], check=True)
    (out / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    print(f"artifact {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")


def count(program: extend.Program) -> int:
    return sum(node.op == "call_function" for node in program.graph.nodes)


# ----------------------------------------------------------------------------------------------------------------------
# Run (runtime/): only the artifact is needed. inferc's runtime has no torch. It keeps K and V in blocks of a KV cache
# instead of computing them again for each token, and steps many sequences at once (runtime/scheduler,
# runtime/kv_cache).


class Engine:
    def __init__(self, out: Path) -> None:
        self.program = extend.from_json(json.loads((out / "program.json").read_text()))
        self.weights = load_file(out / "weights.safetensors")
        self.kernel = ctypes.CDLL(str(out / "kernel.so")).rms_norm

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *_: object) -> Tensor:
        x, out, width = x.contiguous(), torch.empty_like(x), x.shape[-1]
        sizes = ctypes.c_long(x.numel() // width), ctypes.c_long(width), ctypes.c_float(eps)
        self.kernel(*(ctypes.c_void_p(each.data_ptr()) for each in (x, weight, out)), *sizes)
        return out

    def step(self, ids: list[int]) -> int:
        """Return the next token, chosen greedily."""
        inputs = {"token_ids": torch.tensor([ids]), "positions": torch.arange(len(ids))[None]}
        calls = {ops.inferc.rms_norm.default: self.rms_norm}
        (logits,) = self.program.run(inputs, self.weights.__getitem__, calls=calls)
        return int(logits[0, -1].argmax())


def main(model: str | Path = TINY_LLAMA, out: str = "out/line", prompt: str = "def add(a, b):") -> None:
    compile_model(Path(model), Path(out))
    tokenizer, engine = Tokenizer.from_file(f"{out}/tokenizer.json"), Engine(Path(out))
    ids = tokenizer.encode(prompt).ids
    for _ in range(NUM_TOKENS):
        ids.append(engine.step(ids))
    print(f"{ids[-NUM_TOKENS:]}\n{tokenizer.decode(ids)}")


if __name__ == "__main__":
    print(__doc__) if "--help" in sys.argv else main(*sys.argv[1:])
