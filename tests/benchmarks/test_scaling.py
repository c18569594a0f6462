"""The growth of time with lengths: what is measured of an artifact, and the lines that are laid through it."""

from pathlib import Path

import pytest
import scaling


def rows(name: str, start: float, slope: float) -> list[dict[str, object]]:
    lengths = (100, 1000, 10000)
    return [{"format": name, "length": n, "decode_s": start + slope * n, "limit_s": n * slope / 2} for n in lengths]


def test_a_line_goes_through_the_decode_steps() -> None:
    first, second = scaling.fits({"rows": [*rows("bfloat16", 5e-3, 2e-7), *rows("bfloat16-kv8", 4e-3, 1e-7)]})
    assert (first["format"], second["format"]) == ("bfloat16", "bfloat16-kv8")
    assert first["decode_s"] == pytest.approx(5e-3) and first["decode_s_per_token"] == pytest.approx(2e-7)
    assert second["limit_s_per_token"] == pytest.approx(5e-8) and second["largest_error"] < 1e-9


@pytest.mark.slow
def test_every_length_is_measured_of_every_artifact(tiny_artifact: Path, tmp_path: Path) -> None:
    result = scaling.measure({"one": tiny_artifact, "two": tiny_artifact}, [8, 40], turns=2, threads=2)
    assert [(row["format"], row["length"], len(row["runs"])) for row in result["rows"]] == [
        ("one", 8, 2),
        ("one", 40, 2),
        ("two", 8, 2),
        ("two", 40, 2),
    ]
    assert all(row["prefill_s"] > 0 and row["decode_s"] > 0 and row["limit_s"] > 0 for row in result["rows"])
    result |= {"shape": "tiny", "layers": 2, "arena": scaling.arena(tiny_artifact, 2)}
    sizes = [row["bytes"] / row["tokens"] for row in result["arena"]]
    assert sizes == sorted(sizes, reverse=True)  # a constant, and as many bytes for each token
    scaling.draw(result, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes()[:4] == b"\x89PNG"
