"""The rows of targets, what they refuse, and a target from outside."""

from pathlib import Path

import pytest
from null_target.spec import NULL

import inferc
from inferc import targets
from inferc.config import CompileConfig
from inferc.errors import ConfigError, UnsupportedError
from inferc.targets import TARGETS, Target, TargetSpec, find_spec

SUPPORT = Path(__file__).parent / "support"


@pytest.mark.parametrize("spec", TARGETS, ids=lambda spec: spec.name)
def test_every_row_names_a_backend_and_a_runner(spec: TargetSpec) -> None:
    backend, factory = spec.find_backend(), spec.find_runner()
    ops = {kernel.op for kernel in backend.kernels}
    assert backend.code and "aten.linear" in ops and callable(backend.write) and callable(factory.open)
    assert len({kernel.name for kernel in backend.kernels}) == len(backend.kernels), "names tell kernels apart"


@pytest.mark.parametrize(
    "text", ["cpu", "reference", "onnx", "onnx:standard", "onnx:cuda", "cuda:sm_90,sm_80", "tensorrt:sm_75"]
)
def test_a_target_is_written_as_it_is_read(text: str) -> None:
    target = Target.parse(text)
    assert str(target) == text and target.device == text.partition(":")[0]
    assert [find_spec(each) for each in target.each] == [target.spec] * len(target.each)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu", "unknown target 'gpu'; expected one of cpu, cuda, onnx, tensorrt, tensorrt-paged, reference"),
        ("cpu:sm_90", "target 'cpu:sm_90': cpu takes no architecture; write cpu"),
        ("onnx:gpu", "target 'onnx:gpu': onnx takes no architecture; write onnx, onnx:standard or onnx:cuda"),
        ("cuda", "target 'cuda' names no chip; write for example cuda:sm_90"),
        ("cuda:sm_90,sm_90", "target 'cuda:sm_90,sm_90' names a chip twice"),
        ("cuda:sm_70", "target 'cuda:sm_70': no kernels for sm_70; known: sm_80"),
        ("tensorrt", "target 'tensorrt': a plan is for one chip; write for example tensorrt:sm_86"),
        ("tensorrt-paged:sm_75", "target 'tensorrt-paged:sm_75': no kernels for sm_75; known: sm_80"),
    ],
)
def test_what_is_no_target_is_refused(text: str, message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError)) as error:
        Target.parse(text)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_dtype": "int8"}, "--kv-dtype int8: it takes float32, float16; leave it out, or use --target cpu"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16: it takes float32, float16; leave it out, or use --target cpu"),
        ({"quantize": "fp8"}, "--quantize fp8: it takes int8, w8a8, int4"),
        ({"tp": 2}, "--tp 2: it takes 1; leave it out, or use --target cpu"),
        ({"block_size": 16}, "--block-size 16: it does not take it; leave it out, or use --target cpu"),
    ],
)
def test_refusals_are_made_from_the_row(options: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        CompileConfig(target="onnx", **options)  # type: ignore[arg-type]
    assert str(error.value).startswith(f"target onnx: {message}")


def test_a_target_from_outside_is_one_folder(
    tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole target is tests/support/null_target: under 80 lines, and nothing of inferc is changed."""
    assert sum(len(path.read_text().splitlines()) for path in (SUPPORT / "null_target").glob("*.py")) <= 80
    monkeypatch.setattr(targets, "TARGETS", (*TARGETS, NULL))
    summary = inferc.compile(tiny_llama_folder, tmp_path / "out", CompileConfig(target="null", certify="none"))
    assert {row.name.partition(".")[0] for row in summary.kernels} == {"null"}
    with inferc.LLM(tmp_path / "out") as llm:
        (answer,) = llm.generate([[5, 6, 7]], inferc.SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    assert answer.outputs[0].token_ids == [0, 0, 0]
    with pytest.raises(
        UnsupportedError, match=r"--tap \*: .* is for target null, which runs on nothing: its values are not seen"
    ):
        inferc.LLM(tmp_path / "out", tap=("*",))


def test_the_page_shows_the_whole_folder() -> None:
    page = (SUPPORT.parents[1] / "docs" / "architecture.md").read_text()
    for name in ("spec", "backend", "runner"):
        assert (SUPPORT / "null_target" / f"{name}.py").read_text() in page
