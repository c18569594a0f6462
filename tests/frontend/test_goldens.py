"""The captured program of every family, as text: a transformers that changes a graph shows as a diff.

`goldens/NAME.txt` is the text under the transformers of constraints.txt, and under every other one that has no file of
its own (`goldens/NAME-5.17.txt`). INFERC_UPDATE_GOLDENS=1 writes what is found instead of comparing.
"""

import difflib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from families import FAMILIES, skip_without
from tiny_checkpoints import tiny_checkpoint, with_every_kind

from inferc.frontend.export import export_model

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = Path(__file__).parent / "goldens"
NAMES = [name for name, family in FAMILIES.items() if not family.of]  # another rope or window is no other graph
RARE = {  # run with the slow tests
    "gpt_bigcode",
    "olmo",
    "cohere2",
    "glm",
    "seed_oss",
    "exaone4",
    "ernie4_5",
    "helium",
    "arcee",
    "granitemoe",
    "hunyuan_v1_moe",
    "ernie4_5_moe",
    "minimax_m2",
    "glm4_moe",
    "minicpm3",
    "qwen2",
    "gemma",
    "mistral",
    "granite",
    "olmo2",
    "starcoder2",
    "stablelm",
    "smollm3",
    "phi3",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "glm4",
    "deepseek_v2",
}
COMPACT: dict[str, dict[str, Any]] = {  # every kind of layer in fewer of them
    "exaone4": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere2": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "llama4_text": {"num_hidden_layers": 2, "no_rope_layer_interval": 2},
}
RENEW = "INFERC_UPDATE_GOLDENS=1 make unit ARGS=tests/frontend/test_goldens.py"
MAX_BYTES = 700_000


def pinned(file: str = "constraints.txt") -> str:
    """The transformers version (5.23) of a constraints file."""
    (version,) = re.findall(r"^transformers==(\d+\.\d+)", (ROOT / file).read_text(), re.MULTILINE)
    return str(version)


def running() -> str:
    return ".".join(transformers.__version__.split(".")[:2])


def golden(folder: Path, name: str, version: str) -> Path:
    own = folder / f"{name}-{version}.txt"
    return own if own.exists() else folder / f"{name}.txt"


def difference(expected: str, found: str, before: str, after: str) -> str:
    """Return the lines that differ; a new line renumbers later values, so numbers count only if nothing else does."""
    both = [text.splitlines() for text in (expected, found)]
    unnumbered = [[re.sub(r"%\d+", "%", line) for line in lines] for lines in both]
    old, new = both if unnumbered[0] == unnumbered[1] else unnumbered
    return "\n".join(difflib.unified_diff(old, new, before, after, lineterm=""))


def check(folder: Path, name: str, version: str, found: str) -> None:
    """Fail with the differences between `found` and the golden, if there are any."""
    file = golden(folder, name, version)
    assert file.exists(), f"{name} has no golden yet; write it with {RENEW}"
    expected = file.read_text()
    if found != expected:
        lines = difference(expected, found, file.name, f"transformers {version}")
        pytest.fail(
            f"{name} is captured as another program than {file.name}:\n{lines}\nWhere that is right: {RENEW}",
            pytrace=False,
        )


def renew(folder: Path, name: str, version: str, main_version: str, found: str) -> None:
    """Write `found` as the golden of this version, and no second file where it is the main one's too."""
    main, own = folder / f"{name}.txt", folder / f"{name}-{version}.txt"
    if version == main_version:
        for each in folder.glob(f"{name}-*.txt"):  # those that have become equal
            if each.read_text() == found:
                each.unlink()
        main.write_text(found)
    elif main.exists() and main.read_text() == found:
        own.unlink(missing_ok=True)
    else:
        own.write_text(found)


@pytest.mark.quick("falcon", "gpt2", "gpt_neo", "llama")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in RARE else name for name in NAMES]
)
def test_the_captured_program_is_the_golden_one(name: str) -> None:
    skip_without(FAMILIES[name], name)
    checkpoint = with_every_kind(tiny_checkpoint(name, **COMPACT.get(name, {})))
    found = export_model(checkpoint, "float32").to_text()
    if os.environ.get("INFERC_UPDATE_GOLDENS"):
        renew(GOLDENS, name, running(), pinned(), found)
    check(GOLDENS, name, running(), found)


def test_every_golden_is_looked_at_and_small() -> None:
    versions = {pinned(), pinned("constraints-gpu.txt")}
    wanted = {f"{name}.txt" for name in NAMES}
    others = {f"{name}-{version}.txt" for name in NAMES for version in versions - {pinned()}}
    files = {file.name: file.read_text() for file in GOLDENS.iterdir()}
    assert wanted <= files.keys() <= wanted | others
    assert sum(map(len, files.values())) < MAX_BYTES
    same = [
        name for name in NAMES for version in versions if files.get(f"{name}-{version}.txt") == files[f"{name}.txt"]
    ]
    assert not same, "the file of another version says what the first one says; delete it"


def test_a_changed_graph_is_told_with_its_difference(tmp_path: Path) -> None:
    found = (GOLDENS / "llama.txt").read_text()
    assert found.count("aten.silu(") == 1
    (tmp_path / "llama.txt").write_text(found.replace("aten.silu(", "aten.gelu("))
    with pytest.raises(pytest.fail.Exception) as failure:
        check(tmp_path, "llama", "5.23", found)
    message = str(failure.value)
    assert re.search(r"^-.*= aten\.gelu\(", message, re.MULTILINE)
    assert re.search(r"^\+.*= aten\.silu\(", message, re.MULTILINE)
    assert "llama.txt" in message and "transformers 5.23" in message and RENEW in message
    check(GOLDENS, "llama", pinned(), found)


def test_a_difference_leaves_numbers_out_unless_they_are_the_difference() -> None:
    old = "%0: f = a(%x)\n%1: f = b(%0)\n%2: f = c(%1, %0)\n"
    new = "%0: f = a(%x)\n%1: f = new(%0)\n%2: f = b(%1)\n%3: f = c(%2, %1)\n"
    changed = [line for line in difference(old, new, "old", "new").splitlines()[3:] if line[0] != " "]
    assert changed == ["+%: f = new(%)"]
    swapped = [line for line in difference(old, old.replace("%1, %0", "%0, %1"), "old", "new").splitlines()[3:]]
    assert swapped[-2:] == ["-%2: f = c(%1, %0)", "+%2: f = c(%0, %1)"]


def test_a_version_has_a_file_of_its_own_only_where_it_differs(tmp_path: Path) -> None:
    def files() -> dict[str, str]:
        return {file.name: file.read_text() for file in tmp_path.iterdir()}

    renew(tmp_path, "llama", "5.23", "5.23", "new\n")
    renew(tmp_path, "llama", "5.17", "5.23", "new\n")
    assert files() == {"llama.txt": "new\n"}
    renew(tmp_path, "llama", "5.17", "5.23", "old\n")
    assert files() == {"llama.txt": "new\n", "llama-5.17.txt": "old\n"}
    check(tmp_path, "llama", "5.17", "old\n")
    check(tmp_path, "llama", "5.20", "new\n")
    with pytest.raises(pytest.fail.Exception, match="llama-5.17.txt"):
        check(tmp_path, "llama", "5.17", "new\n")
    renew(tmp_path, "llama", "5.23", "5.23", "old\n")  # the two agree again
    assert files() == {"llama.txt": "old\n"}
    with pytest.raises(AssertionError, match="qwen2 has no golden"):
        check(tmp_path, "qwen2", "5.23", "")
