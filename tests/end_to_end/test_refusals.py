"""Models that are captured but that nothing can run are refused in words their user knows."""

from pathlib import Path
from typing import Any

import pytest
from random_models import make_random_model

from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import UnsupportedError


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("llama", {"head_dim": 520}, r"^head_dim 520: expected a multiple of 16, at most 512 \(node layers.0"),
        ("llama", {"hidden_act": "mish"}, r"cannot run aten.mish .*node layers.0.mlp.act_fn.*not supported"),
    ],
)
def test_refusals(family: str, sizes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = make_random_model(family, tmp_path / "m", num_hidden_layers=1, **sizes)
    with pytest.raises(UnsupportedError, match=message) as caught:
        compile(folder, tmp_path / "out", CompileConfig(certify="none"))
    for word in ("\n", "RULES", "rejected", "rewrite it"):
        assert word not in str(caught.value)
    assert not (tmp_path / "out").exists()
