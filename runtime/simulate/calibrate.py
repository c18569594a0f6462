"""The cost model of an engine, fitted to steps that it runs, and the file of that model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inferc.cost.machine import cpu_model
from inferc.errors import ConfigError
from inferc.runtime.engine.engine import Engine
from inferc.runtime.step.cost import WORK, StepCost
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.system.atomic_file import atomic_write
from inferc.system.json_text import parse_json
from inferc.system.resources import available_cores

FORMAT = 1
SHIPPED = Path(__file__).parent / "costs" / "qwen3-0.6b-int8-cpu.json"
LONGEST_PROMPT = 2048
WARM_SHARE = 0.1  # the share of the time that passes before anything is counted


@dataclass(frozen=True)
class CostFile:
    """The prices of a step's work in seconds, in the order of `WORK`, with the machine and the model they apply to.

    error: the mean relative error of predicted step times. num_blocks: the KV blocks of the measured engine, which a
    simulation uses unless told otherwise.
    """

    model: str
    machine: str
    prices: dict[str, float]
    error: float
    num_steps: int
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def cost(self) -> StepCost:
        cost = StepCost()
        cost.set_prices(self.prices)
        return cost

    def save(self, path: Path) -> None:
        """Write the file. Raises ConfigError if it cannot be written."""
        with atomic_write(path) as partial:
            partial.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")


def read_cost(path: Path) -> CostFile:
    """Read a cost file. Raises ConfigError if it is none."""
    hint = "make one with `inferc simulate --engine OUT --save-cost FILE`"
    try:
        values: dict[str, Any] = parse_json(path.read_bytes())
        found = values.pop("format")
        file = CostFile(**values)
        sizes = (file.num_blocks, file.block_size, file.max_model_len, file.max_num_seqs, file.max_num_batched_tokens)
        if (
            found != FORMAT
            or set(file.prices) != set(WORK)
            or not all(type(size) is int and size > 0 for size in sizes)
        ):
            raise ValueError(f"format {found}, prices of {', '.join(file.prices)}")
        if min(file.prices.values()) < 0 or not max(file.prices.values()) > 0:
            raise ValueError("prices below zero, or none above")
    except OSError as error:
        raise ConfigError(f"cannot read the cost file {path}: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is no cost file ({error}); {hint}") from None
    return file


def measure_cost(
    engine: Engine,
    model: str,
    seconds: float = 20.0,
    kv_bytes_per_token: int = 0,
    progress: Callable[[float], None] | None = None,
) -> CostFile:
    """Run random requests at concurrencies from one to the engine's maximum, and fit prices to the steps.

    progress: called with the share that is done. Nothing else may use the engine meanwhile.
    """
    scheduler = engine.scheduler
    config = scheduler.config
    levels = [1]
    while levels[-1] < config.max_num_seqs:
        levels.append(min(2 * levels[-1], config.max_num_seqs))
    scheduler.foresees = True
    begun = time.perf_counter()
    _run(engine, config.max_num_seqs, WARM_SHARE * seconds)
    scheduler.forecast.cost = StepCost()
    # Small and large batches alternate, so that a change in the machine's load is not mistaken for their price.
    order = [level for _ in range(3) for level in levels]
    for level in order:
        _run(engine, level, (1 - WARM_SHARE) * seconds / len(order))
        if progress is not None:
            progress(min(1.0, (time.perf_counter() - begun) / seconds))
    cost = scheduler.forecast.cost
    return CostFile(
        model=model,
        machine=f"{cpu_model()}, {available_cores()} cores",
        prices=dict(zip(WORK, map(float, cost.prices), strict=True)),
        error=cost.error,
        num_steps=cost.num_steps,
        vocab_size=engine.model.vocab_size,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        num_blocks=config.num_blocks[0],
        kv_bytes_per_token=kv_bytes_per_token,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )


def _run(engine: Engine, level: int, seconds: float) -> None:
    """Keep `level` random requests running for a while, then abort them."""
    rng = np.random.default_rng(level)
    longest = min(LONGEST_PROMPT, engine.scheduler.cache.max_tokens // 2, engine.model.max_model_len // 2)
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        while len(engine.request_ids) < level:
            length = max(1, int(np.exp(rng.uniform(np.log(8), np.log(max(9, longest))))))
            output_len = int(rng.integers(2, 2 + min(64, longest)))
            prompt = rng.integers(1, engine.model.vocab_size, length).tolist()
            params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
            engine.add_request(f"{level}-{count}", prompt, params)
            count += 1
        engine.step()
    for name in engine.request_ids:
        engine.abort(name)
    while engine.has_work:
        engine.step()
