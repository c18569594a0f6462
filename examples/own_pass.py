"""An example of a custom pass, op and C++ kernel: OLMo 2's norm and residual addition in one kernel instead of two.

python examples/own_pass.py [OUT], or inferc compile MODEL -o OUT --pass examples/own_pass.py:fuse_add_rms_norm"""

import sys
from pathlib import Path

from torch import Tensor, fx, ops
from transformers import AutoConfig, AutoModelForCausalLM

import inferc
from inferc import extend


@extend.define(
    "example::add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool early) -> Tensor",
    extend.like_first,
)
def two_ops(x: Tensor, residual: Tensor, weight: Tensor, eps: float, early: bool) -> Tensor:
    return ops.aten.add.Tensor(residual, ops.inferc.rms_norm.default(x, weight, eps, 0.0, early))  # type: ignore[no-any-return]


def one_op(x: Tensor, residual: Tensor, weight: Tensor, eps: float, early: bool) -> Tensor:
    return ops.example.add_rms_norm.default(x, residual, weight, eps, early)  # type: ignore[no-any-return]


def call(node: fx.Node, values: extend.Values) -> extend.Call:
    b = extend.Builder(node, values)
    (x, _), (residual, _), (out, result) = b.read("x"), b.read("residual"), b.write()
    norm = f"{extend.cpp_float(b.arg('eps'))}, 0.0f, {str(b.arg('early')).lower()}"
    args = (
        f"{x}, {residual}, {b.weight('weight')}, Norm{{{{{norm}}}}}, {extend.row_count(result)}, {result.width}, {out}"
    )
    return b.done(f"add_rms_norm<{extend.cpp_type(result)}>(t, {args});")


class OwnRewrite(extend.Rewrite):
    headers = Path(__file__).parent / "own_kernels"
    why_not = staticmethod(lambda node, target: "" if target.device == "cpu" else extend.OTHER_TARGET)
    kernels = (extend.Kernel("cpp", "example.add_rms_norm", "example.add_rms_norm", why_not, call, {"weight": None}),)


fuse_add_rms_norm = OwnRewrite("fuse_add_rms_norm", two_ops, one_op)


def main(out: str = "out/own-pass") -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 3}
    config = AutoConfig.for_model("olmo2", vocab_size=512, eos_token_id=1, max_position_embeddings=128, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    for name, passes in (("plain", ()), ("own", (fuse_add_rms_norm,))):
        summary = inferc.compile(model, f"{out}/{name}", inferc.CompileConfig(passes=passes))
        adds = {row.name: row.nodes for row in summary.kernels if "add" in row.name}
        with inferc.LLM(f"{out}/{name}") as llm:
            answers = llm.generate([[1, 2, 3], [4, 5]], inferc.SamplingParams(temperature=0.0, max_tokens=16))
        print(f"{name}: {adds}\n", *(answer.outputs[0].token_ids for answer in answers))


if __name__ == "__main__":
    print(__doc__) if "--help" in sys.argv else main(*sys.argv[1:])
