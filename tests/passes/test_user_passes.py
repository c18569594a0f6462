"""Passes from outside the package: what they may bring, where they run, and how their faults are told."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graphs import example, random, rows

from inferc.backends.lower import LowerConfig, build_pipeline
from inferc.codegen.cpp.calls.builder import Builder, cpp_float
from inferc.codegen.cpp.table import KERNELS
from inferc.codegen.cpp.values import Call, row_count
from inferc.codegen.kernel import OTHER_TARGET, Kernel
from inferc.codegen.values import Values
from inferc.compiler.build import CompileSummary, compile
from inferc.config import CompileConfig, ContextLength
from inferc.errors import ConfigError, InfercError, UnsupportedError, VerifyError
from inferc.ir.ops.registry import define, like_first
from inferc.ir.program import Program
from inferc.ir.weights import source
from inferc.passes.pipeline import run_passes
from inferc.passes.user_passes import UserPass, load_passes
from inferc.runtime.engine.llm import LLM
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.targets import Target

aten, inferc = torch.ops.aten, torch.ops.inferc
Edit = Callable[[Program], Any]


def a_pass(edit: Edit, name: str = "edit", **attributes: Any) -> Any:
    """An object as a user writes it: nothing of ours but the protocol."""

    class Edited(SimpleNamespace):
        def __call__(self, program: Program) -> Any:
            return edit(program)

    return Edited(name=name, **attributes)


def leave_alone(program: Program) -> int:
    return 0


def compiled(folder: Path, out: Path, *passes: Any, **options: Any) -> CompileSummary:
    return compile(
        folder, out, CompileConfig(**{"certify": "none", "target": "reference", **options, "passes": passes})
    )


# ------------------------------------------------------------------------------------- an op and a kernel


@define("user_tests::halve(Tensor x, float by) -> Tensor", like_first)
def halve(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


def call_halve(node: torch.fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    out, result = b.write()
    return b.done(f"halve(t, {x}, {cpp_float(b.arg('by'))}, {row_count(result)}, {result.width}, {out});")


def on_cpu(node: torch.fx.Node, target: Target) -> str:
    return "" if target.device == "cpu" else OTHER_TARGET


HALVE = Kernel("cpp", "user_tests.halve", "user_tests.halve", on_cpu, call_halve)
HALVE_H = """\
#pragma once
namespace inferc {
inline void halve(Team& team, Rows<const float> x, float by, i64 rows, i64 width, Rows<float> out) {
  mul_scalar<float>(team, x, by, rows, width, out);
}
}  // namespace inferc
"""


def after(program: Program, target: Any, made: Any, *args: Any) -> int:
    """Put a call of `made` behind every call of `target`."""
    found = program.graph.find_nodes(op="call_function", target=target)
    for node in found:
        with program.graph.inserting_after(node):
            new = program.graph.call_function(made, (node, *args))
        new.meta.update(node.meta, name=f"{node.meta['name']}.more")
        node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
    return len(found)


def halve_logits(program: Program) -> int:
    return after(program, inferc.lm_head.default, torch.ops.user_tests.halve.default, 0.5)


def halve_mlp(program: Program) -> int:
    return after(program, inferc.silu_mul.default, torch.ops.user_tests.halve.default, 1.0)


def with_kernel(folder: Path, edit: Edit, **attributes: Any) -> Any:
    (folder / "own").mkdir(exist_ok=True)
    (folder / "own" / "halve.h").write_text(HALVE_H)
    return a_pass(edit, kernels=(HALVE,), headers=folder / "own", **attributes)


@pytest.mark.slow
def test_an_own_op_runs_with_its_own_kernel(tiny_llama_folder: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    """The op runs in the layers (by 1: the certificate agrees) and on the logits (by a half: tokens stay)."""
    in_layers = with_kernel(tmp_path, halve_mlp, name="in_layers", after="fuse_silu_mul")
    summary = compiled(tiny_llama_folder, tmp_path / "layers", in_layers, target="cpu", certify="full")
    assert {row.name: row.nodes for row in summary.kernels}["user_tests.halve"] == 2
    assert summary.certificate is not None and summary.certificate.ok
    assert "in_layers" in [row.name for row in summary.certificate.rows]

    on_logits = with_kernel(tmp_path, halve_logits, name="on_logits")
    summary = compiled(tiny_llama_folder, tmp_path / "logits", on_logits, target="cpu")
    names = [record.name for record in summary.passes]
    assert names[names.index("on_logits") - 1 : names.index("on_logits") + 2] == [
        "split_head",
        "on_logits",
        "fuse_linear_silu_mul",
    ]
    manifest = json.loads((tmp_path / "logits" / "engine.json").read_text())
    assert manifest["config"]["passes"] == [f"{__name__}:on_logits"]
    assert {"name": "on_logits", "rewrites": 1}.items() <= manifest["passes"][names.index("on_logits")].items()
    text = (tmp_path / "logits" / "graph" / f"{names.index('on_logits') + 1}_on_logits.txt").read_text()
    assert "user_tests.halve(%" in text
    assert (tmp_path / "logits" / "kernels" / "cpp" / "halve.h").read_text() == HALVE_H
    assert "user_tests" not in json.dumps([kernel.name for kernel in KERNELS])

    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    answers = []
    for artifact in (tiny_artifact, tmp_path / "layers", tmp_path / "logits"):
        with LLM(artifact, num_threads=2) as llm:
            answers.append([answer.outputs[0] for answer in llm.generate([[5, 6, 7], [8, 9]], params)])
    plain, same, halved = answers
    assert [one.token_ids for one in plain] == [one.token_ids for one in same] == [one.token_ids for one in halved]
    assert [one.logprobs for one in plain] == [one.logprobs for one in same]
    assert [one.logprobs for one in plain] != [one.logprobs for one in halved]


def test_an_own_kernel_goes_before_ours_for_one_compile(tmp_path: Path) -> None:
    own = Kernel("cpp", "inferc.silu_mul", "mine.silu_mul", on_cpu, "inferc.codegen.cpp.calls.elementwise:silu_mul")
    config = LowerConfig(Target.parse("cpu"), passes=load_passes((a_pass(leave_alone, kernels=(own,)),)))

    def graph(gate: Any, up: Any) -> Any:
        return inferc.silu_mul.default(gate, up)

    chosen = []
    for passes in (build_pipeline(config), build_pipeline(LowerConfig(Target.parse("cpu")))):
        made = example(graph, {"gate": rows(8), "up": rows(8)})
        next(each for each in passes if each.name == "choose_kernels")(made.program)
        chosen += [node.meta["kernel"] for node in made.program.graph.nodes if "kernel" in node.meta]
    assert chosen == ["mine.silu_mul", "cpp.silu_mul.float32"]
    # Nor is the op taken into another one.
    assert "fuse_linear_silu_mul" not in [each.name for each in build_pipeline(config)]
    assert "fuse_linear_silu_mul" in [each.name for each in build_pipeline(LowerConfig(Target.parse("cpu")))]


def test_an_own_op_needs_a_kernel_for_the_target(tiny_llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"user_tests\.halve \(node .*\) has no kernel on target reference"):
        compiled(tiny_llama_folder, tmp_path / "out", with_kernel(tmp_path, halve_logits))
    with pytest.raises(UnsupportedError, match="has no kernel on target cpu; its pass must bring one in `kernels`"):
        compiled(tiny_llama_folder, tmp_path / "out", a_pass(halve_logits), target="cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_drift_budget_covers_a_pass(tiny_llama_folder: Path, tmp_path: Path) -> None:
    double = a_pass(lambda p: after(p, inferc.silu_mul.default, aten.mul.Tensor, 1.01), "scale", after="fuse_silu_mul")
    with pytest.raises(VerifyError, match=r"scale \(run by reference\): its logits are off .* --allow-drift"):
        compiled(tiny_llama_folder, tmp_path / "out", double, certify="full")
    assert list(tmp_path.iterdir()) == []
    summary = compiled(tiny_llama_folder, tmp_path / "out", double, certify="full", allow_drift=True)
    assert summary.certificate is not None and not summary.certificate.ok
    (row,) = [row for row in summary.certificate.rows if row.name == "scale"]
    assert not row.ok and "allowed 1e-05" in row.reason


def test_a_certificate_by_layers_covers_a_pass(tiny_llama_folder: Path, tmp_path: Path) -> None:
    same = a_pass(lambda p: after(p, inferc.silu_mul.default, aten.mul.Tensor, 1.0), "scale", after="fuse_silu_mul")
    summary = compiled(tiny_llama_folder, tmp_path / "out", same, certify="layers")
    assert summary.certificate is not None and summary.certificate.ok
    assert "scale" in [row.name for row in summary.certificate.rows]


# --------------------------------------------------------------------------------------------------- place


def test_places() -> None:
    own = load_passes(
        (
            a_pass(leave_alone, "last"),
            a_pass(leave_alone, "first", after="canonicalise"),
            a_pass(leave_alone, "second", after="canonicalise"),
        )
    )
    names = [each.name for each in build_pipeline(LowerConfig(Target.parse("cpu"), passes=own))]
    assert names[:3] == ["canonicalise", "first", "second"] and names[-6:-4] == ["split_head", "last"]


def test_a_pass_that_finds_nothing_warns(caplog: pytest.LogCaptureFixture) -> None:
    run_passes(example(lambda x: aten.relu.default(x), {"x": rows(4)}).program, load_passes((a_pass(leave_alone),)))
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert record.getMessage() == "pass edit rewrote nothing in example"


# ------------------------------------------------------------------------------------------ broken programs


def wrong_shape(program: Program) -> int:
    node = program.output().all_input_nodes[0]
    node.meta["val"] = program.fake((3, 4), torch.float32)
    return 1


def dead_node(program: Program) -> int:
    (result,) = program.output().all_input_nodes
    with program.graph.inserting_before(program.output()):
        node = program.graph.call_function(aten.relu.default, (result,))
    node.meta.update(result.meta, name="left_over")
    return 1


def read_too_early(program: Program) -> int:
    first = next(node for node in program.graph.nodes if node.op == "call_function")
    (result,) = program.output().all_input_nodes
    first.args = (result,)
    return 1


def unused_weight(program: Program) -> int:
    program.weights["spare"] = source("spare", (4,), torch.float32)
    return 1


def no_output(program: Program) -> int:
    program.graph.erase_node(program.output())
    return 1


def fewer_results(program: Program) -> int:
    program.output().args = ((),)
    program.drop_unused()
    return 1


def narrow_result(program: Program) -> int:
    (result,) = program.output().all_input_nodes
    with program.graph.inserting_before(program.output()):
        node = program.graph.call_function(aten.slice.Tensor, (result, -1, 0, 2))
    node.meta.update(val=program.fake((result.meta["val"].shape[0], 2), torch.float32), name="narrow")
    program.output().args = ((node,),)
    return 1


def another_input(program: Program) -> int:
    with program.graph.inserting_before(next(iter(program.graph.nodes))):
        program.graph.placeholder("extra").meta["val"] = program.fake((3,), torch.float32)
    return 1


def no_type(program: Program) -> int:
    del program.output().all_input_nodes[0].meta["val"]
    return 1


BROKEN: dict[Edit, str] = {
    wrong_shape: "exp_default is declared float32[3, 4], its op says float32[s77, 4]",
    dead_node: "left_over is read by nothing; call program.drop_unused()",
    read_too_early: "relu_default reads exp_default, which is after it",
    unused_weight: "weights that nothing reads: spare; call program.drop_unused()",
    no_output: "exp_default is the last node; expected one output, at the end",
    fewer_results: "output has other results than before: found none, expected float32[s77, 4]",
    narrow_result: "output has other results than before: found float32[s77, 2], expected float32[s77, 4]",
    another_input: "output has other inputs than before: found extra: float32[3], x: float32[s77, 4]",
    no_type: "exp_default has no type",
}


@pytest.mark.parametrize("edit", BROKEN, ids=lambda edit: edit.__name__)
def test_a_broken_program_is_drawn_with_the_name_of_the_pass(edit: Edit) -> None:
    made = example(lambda x: aten.exp.default(aten.relu.default(x)), {"x": rows(4)})
    symbol = str(made.program.inputs()[0].meta["val"].shape[0])
    with pytest.raises(VerifyError) as caught:
        run_passes(made.program, load_passes((a_pass(edit, "own"),)))
    message = str(caught.value)
    assert message.startswith(f"after own ({__name__}:own): example: {BROKEN[edit].replace('s77', symbol)}"), message
    assert edit is unused_weight or "\n  --> " in message


# ---------------------------------------------------------------------------------------- broken protocol


def raises(program: Program) -> int:
    raise KeyError("no\nsuch key")


def refuses(program: Program) -> int:
    raise UnsupportedError("two biases: expected one")


def says_nothing(program: Program) -> int:
    dead = program.output().all_input_nodes[0]
    dead.args = (program.inputs()[0],)
    program.drop_unused()
    return 0


FAULTS: dict[Edit, str] = {
    raises: r"pass own \(\S+:own\) raised KeyError: 'no\\nsuch key'; INFERC_DEBUG=1 shows where",
    refuses: r"pass own \(\S+:own\): two biases: expected one",
    says_nothing: r"pass own \(\S+:own\) returned 0 and changed the program; return the number of rewrites",
}
RETURNED: tuple[Any, ...] = (None, "1", True, 1.0, -1)


@pytest.mark.parametrize("edit", FAULTS, ids=lambda edit: edit.__name__)
def test_a_pass_that_fails_is_named(edit: Edit) -> None:
    made = example(lambda x: aten.exp.default(aten.relu.default(x)), {"x": rows(4)})
    with pytest.raises(ConfigError, match=FAULTS[edit]) as caught:
        run_passes(made.program, load_passes((a_pass(edit, "own"),)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("result", RETURNED, ids=repr)
def test_a_pass_that_returns_no_count_is_named(result: Any) -> None:
    made = example(lambda x: aten.relu.default(x), {"x": rows(4)})
    expected = rf"pass own \(\S+:own\) returned {result!r}, expected the number of its rewrites"
    with pytest.raises(ConfigError, match=expected):
        run_passes(made.program, load_passes((a_pass(lambda program: result, "own"),)))


def test_faults_of_a_kernel_are_told_as_the_users() -> None:
    def fails(*_args: Any) -> Any:
        raise ZeroDivisionError

    broken = Kernel("cpp", "inferc.silu_mul", "mine", fails, fails)
    (own,) = load_passes((a_pass(leave_alone, "own", kernels=(broken,)),))
    (kernel,) = own.kernels
    with pytest.raises(ConfigError, match=r"kernel mine of \S+:own: why_not raised ZeroDivisionError; INFERC_DEBUG=1"):
        kernel.why_not(None, Target.parse("cpu"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"kernel mine of \S+:own: emit raised ZeroDivisionError"):
        kernel.load_emit()(None, None)


@pytest.mark.slow
def test_source_that_does_not_compile_is_one_line(tiny_llama_folder: Path, tmp_path: Path) -> None:
    own = with_kernel(tmp_path, halve_logits)
    (tmp_path / "own" / "halve.h").write_text("int broken() { return nothing; }\n")
    with pytest.raises(InfercError, match=r"failed for \w+: halve\.h:1:\d+: error: .*nothing.*") as caught:
        compiled(tiny_llama_folder, tmp_path / "out", own, target="cpu")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------- loading


class NoInstance:
    name = "no_instance"

    def __call__(self, program: Program) -> int:
        return 0


def cpp(name: str, backend: str = "cpp", emit: Any = call_halve) -> Kernel:
    return Kernel(backend, "user_tests.halve", name, on_cpu, emit)


REFUSED = {
    "class": ((NoInstance,), "is a class; name an object of it (noinstance = NoInstance())"),
    "not_callable": ((3,), "is 3, expected an object that is called with the program"),
    "no_name": ((leave_alone,), "has the name None, expected letters, digits and _: give it an attribute `name`"),
    "path_name": ((a_pass(leave_alone, "../x"),), "has the name '../x', expected letters"),
    "after": ((a_pass(leave_alone, after=3),), "its `after` is 3, expected the name of a pass"),
    "kernels": ((a_pass(leave_alone, kernels=[HALVE]),), "expected a tuple of inferc.extend.Kernel"),
    "triton": ((a_pass(leave_alone, kernels=(cpp("k", "triton"),)),), "has the backend 'triton'"),
    "no_emit": ((a_pass(leave_alone, kernels=(cpp("k", emit=""),)),), "kernel k has the backend 'cpp' and emit ''"),
    "headers": ((a_pass(leave_alone, headers="/no/such"),), "its `headers` are '/no/such', expected a folder"),
    "twice": ((a_pass(leave_alone), a_pass(leave_alone)), "there is a pass named edit already; give it another name"),
    "our_kernel": ((a_pass(leave_alone, kernels=(cpp("cpp.cat"),)),), "there is a kernel named cpp.cat already"),
    "two_kernels": ((a_pass(leave_alone, kernels=(HALVE, HALVE)),), "there is a kernel named user_tests.halve already"),
    "spec": (("own",), "'own': expected MODULE:NAME or FILE.py:NAME"),
    "empty_spec": (("own:",), "'own:': expected MODULE:NAME or FILE.py:NAME"),
    "module": (("no.such_module:x",), "there is no module 'no'; run from the folder it is in, or install it"),
    "file": (("no_such.py:x",), "there is no file no_such.py"),
    "attribute": (("inferc.ir.ops:no_such",), "inferc.ir.ops has no 'no_such'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_pass_is_refused(case: str) -> None:
    passes, expected = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        load_passes(passes)
    assert expected in str(caught.value) and str(caught.value).startswith("--pass ") and "\n" not in str(caught.value)


def test_headers_that_clash_or_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no \.h file; put the C\+\+ of its kernels there"):
        load_passes((a_pass(leave_alone, headers=tmp_path),))
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.h").write_text(f"// {name}")
    shared = load_passes([a_pass(leave_alone, name, headers=tmp_path / "one") for name in ("a", "b")])
    assert [dict(each.own_headers) for each in shared] == [{"own.h": "// one"}] * 2
    with pytest.raises(ConfigError, match=r"there is a header named own\.h already"):
        load_passes([a_pass(leave_alone, name, headers=tmp_path / name) for name in ("one", "two")])
    (tmp_path / "three" / "gemm.h").write_text("")
    with pytest.raises(ConfigError, match=r"there is a header named gemm\.h already"):
        load_passes((a_pass(leave_alone, headers=tmp_path / "three"),))


def test_places_and_names_of_ours_are_refused() -> None:
    for each, expected in (
        (a_pass(leave_alone, "fuse_rope"), "inferc has a pass named fuse_rope"),
        (a_pass(leave_alone, after="choose_kernels"), "its `after` is 'choose_kernels', expected one of canonicalise,"),
        (a_pass(leave_alone, after="fuse_everything"), "its `after` is 'fuse_everything', expected one of"),
    ):
        with pytest.raises(ConfigError, match=expected):
            build_pipeline(LowerConfig(Target.parse("cpu"), passes=load_passes((each,))))


def test_modules_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is loaded once a process, as it may define ops; by its path, whatever module has its name."""
    text = "class Own:\n    name = 'own'\n    def __call__(self, program):\n        return 0\nown = Own()\n"
    (tmp_path / "json.py").write_text(text)
    (tmp_path / "user_test_module.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    spec = f"{tmp_path}/json.py:own"
    (first,), (again,) = load_passes((spec,)), load_passes((spec,))
    assert isinstance(first, UserPass) and (first.name, first.spec, first.after) == ("own", spec, "split_head")
    assert first.run is again.run and json.loads("1") == 1
    (named,) = load_passes(("user_test_module:own",))
    assert named.run is not first.run and named.spec == "user_test_module:own"


def test_a_config_names_passes() -> None:
    """The artifact does not depend on the folder of the passes: equal input gives equal bytes wherever it is."""
    config = CompileConfig(passes=("/some/where/own.py:one", "own.two:two", a_pass(leave_alone)))
    resolved = config.resolve("float32", ContextLength(64, 64))
    assert resolved.passes == ("own.py:one", "own.two:two", f"{__name__}:edit")
    with pytest.raises(ConfigError, match="passes is 'own:one', expected a tuple"):
        CompileConfig(passes="own:one")  # type: ignore[arg-type]


def test_a_module_that_fails_is_told(tmp_path: Path) -> None:
    for text, expected in (
        ("1 / 0", "importing it raised ZeroDivisionError: division by zero; INFERC_DEBUG=1 shows where"),
        ("def", "importing it raised SyntaxError: "),
        ("import no_such_module_of_anyone", "importing it raised ModuleNotFoundError: No module named"),
        ("raise SystemExit(3)", "importing it raised SystemExit: 3"),
    ):
        (tmp_path / "broken.py").write_text(text)
        with pytest.raises(ConfigError, match=expected):
            load_passes((f"{tmp_path}/broken.py:own",))


def test_an_op_of_ours_is_not_defined_again() -> None:
    """Two ops of one name would be one op with two meanings."""
    with pytest.raises(RuntimeError, match="halve"):
        define("user_tests::halve(Tensor x, float by) -> Tensor", like_first)(halve)
    x = random(3, 4)
    torch.testing.assert_close(torch.ops.user_tests.halve.default(x, 0.5), 0.5 * x)
