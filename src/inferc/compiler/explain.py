"""The explanation of a model's passes from its config.json alone: it is captured and lowered in memory.

Nothing is written.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass
from pathlib import Path

from inferc.backends.lower import LowerConfig, build_pipeline
from inferc.config import CompileConfig, ResolvedCompileConfig
from inferc.cost.formulas import CostLog, extended
from inferc.cost.recorder import CostRecorder
from inferc.cost.report import Refusal
from inferc.errors import UnsupportedError, VerifyError
from inferc.frontend.capture import capture
from inferc.frontend.checkpoint.load import Checkpoint, load_config
from inferc.frontend.export import context_length
from inferc.frontend.layers import layer_kinds, repetition, shortened
from inferc.passes.pipeline import run_passes
from inferc.system.progress import Progress
from inferc.targets import Target

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExplainedModel:
    """The costs of a model after each pass, the resolved compile config, and what refused the model."""

    costs: CostLog
    config: ResolvedCompileConfig
    refusal: Refusal | None
    captured_layers: tuple[int, ...]  # the number of layers of each model that was captured


def explain_model(path: str | Path, config: CompileConfig, progress: Progress) -> ExplainedModel:
    """Capture and lower the model of `path`, a Hugging Face folder, a config.json or a hub id, without reading weights.

    Where layers repeat, two shortened models are captured and the costs of the other layers are extrapolated (see
    `frontend.layers`). Raises what a compile raises if it refuses the model before the passes; a refusal by a pass is
    part of the result.
    """
    progress("read config.json", 0, 1)
    checkpoint = load_config(path)
    config = dataclasses.replace(config, certify="none")
    resolved = config.resolve(checkpoint.dtype, context_length(checkpoint.config))
    repeated = repetition(layer_kinds(checkpoint))
    if repeated is not None:
        fewer, more = shortened(checkpoint, repeated.short), shortened(checkpoint, repeated.longer)
        sizes = [_num_elements(each) for each in (checkpoint, fewer, more)]
        if sizes[0] == sizes[1] + repeated.times * (sizes[2] - sizes[1]):
            short, _ = _lowered(fewer, resolved, progress, check=False)
            # The longer model has every layer of the shorter, so it alone needs to be checked against transformers.
            longer, refusal = _lowered(more, resolved, progress, check=True)
            if len(short.passes) == len(longer.passes):
                costs = extended(short, longer, repeated.times)
                return ExplainedModel(costs, resolved, refusal, (repeated.short, repeated.longer))
        log.info("%s: its layers are not as equal as they look; capturing all of them", checkpoint.name)
    costs, refusal = _lowered(checkpoint, resolved, progress, check=True)
    return ExplainedModel(costs, resolved, refusal, (costs.facts.num_layers,))


def _num_elements(checkpoint: Checkpoint) -> int:
    return sum(math.prod(shape) for shape, _ in checkpoint.tensors.values())


def _lowered(
    checkpoint: Checkpoint, config: ResolvedCompileConfig, progress: Progress, *, check: bool
) -> tuple[CostLog, Refusal | None]:
    """Return the costs after each pass, up to a pass that refuses the model."""
    progress(f"capture {checkpoint.config.num_hidden_layers} layers", 0, 1)
    program = capture(checkpoint, config.dtype, config.max_model_len, check=check)
    target = Target.parse(config.target)
    lower_config = LowerConfig(target, config.block_size, quantize=config.quantize, kv_dtype=config.kv_dtype)
    pipeline = build_pipeline(lower_config)
    recorder = CostRecorder()
    try:
        run_passes(program, pipeline, observe=recorder)
    except (UnsupportedError, VerifyError) as error:
        stopped = pipeline[len(recorder.rows) - 1].name
        return recorder.log(program), Refusal(stopped, str(error))
    try:
        lower_config.backend(target).try_write(program, lower_config)
    except UnsupportedError as error:
        return recorder.log(program), Refusal("emit", str(error))
    return recorder.log(program), None
