"""The pooling of a model's hidden states into text vectors, as sentence-transformers writes it beside a checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from inferc.errors import ConfigError
from inferc.frontend.checkpoint.load import Checkpoint
from inferc.manifest_types import Pooling, PoolingKind

log = logging.getLogger(__name__)

MODULES = "modules.json"
# The flags of old pooling configs, and the modes of new ones, with the names that inferc uses.
FLAGS: dict[str, PoolingKind] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
}
MODES: dict[str, PoolingKind] = {"lasttoken": "last", "last": "last", "mean": "mean", "cls": "first"}


def pooling(checkpoint: Checkpoint) -> Pooling | None:
    """Return the pooling as modules.json says, or None without the file.

    A model with another pooling, or with a dense layer after it, gives None and a warning. Raises ConfigError for
    damaged files.
    """
    if checkpoint.folder is None or not (checkpoint.folder / MODULES).is_file():
        return None
    modules = _read(checkpoint.folder / MODULES)
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ConfigError(f"{checkpoint.folder / MODULES}: expected a list of modules; download it again or delete it")
    kinds = [str(each.get("type", "")).rpartition(".")[2] for each in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        log.warning("%s: no vectors of texts: modules %s are not supported", checkpoint.name, ", ".join(kinds))
        return None
    config = _read(checkpoint.folder / str(modules[1].get("path", "1_Pooling")) / "config.json")
    if not isinstance(config, dict):
        raise ConfigError(
            f"{checkpoint.folder}: the pooling's config.json is no object; download it again or delete it"
        )
    found = [ours for name, ours in FLAGS.items() if config.get(name) is True]
    unknown = [
        name for name in config if name.startswith("pooling_mode_") and config[name] is True and name not in FLAGS
    ]
    if not found and isinstance(config.get("pooling_mode"), str):
        mode = config["pooling_mode"]
        found, unknown = ([MODES[mode]], []) if mode in MODES else ([], [mode])
    if len(found) != 1 or unknown:
        log.warning(
            "%s: no vectors of texts: pooling %s is not supported", checkpoint.name, ", ".join(unknown) or "none"
        )
        return None
    return Pooling(found[0], "Normalize" in kinds)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot read it: {error}; download it again or delete {MODULES}") from None
