"""Run steps of a small model in Triton's interpreter beside the references, and print what differs as JSON.

python interpreted_model.py MODEL DTYPE: prefill of two sequences, then decode of one beside a chunk of the other and a third.
{"errors": largest difference of the logits of each step, "scale": largest logit, "same": whether the best ids agree,
"cache": largest difference of K and V, "kernels": how often each ran, "launches": of a step}
"""

import json
import sys
from collections import Counter

import torch
from interpreted_step import InterpretedStep
from triton_cases import to_pool

from inferc.codegen.target import Target
from inferc.frontend.export import capture
from inferc.frontend.load import load
from inferc.passes.pipeline import LowerConfig, lower
from inferc.reference import IN_PLACE, Chunk, new_kv_caches, step_inputs, weight_reader

FIRST = [Chunk([5, 7, 11, 13, 17, 19, 23, 29, 31], 0, [3]), Chunk([2, 3, 4, 5, 6], 0, [1])]
SECOND = [Chunk([8], 9, [3]), Chunk(list(range(20, 40)), 5, [1, 4]), Chunk([9, 10], 0, [2])]


def main(folder: str, dtype: str) -> None:
    checkpoint = load(folder)
    program = capture(checkpoint, dtype, 128)
    lower(program, LowerConfig(Target.parse("cuda:sm_90"), block_size=16))
    read = weight_reader(program, checkpoint.reader)
    caches = new_kv_caches(program, 6)
    for cache in caches:
        cache[0] = float("nan")
    step = InterpretedStep(program, read, caches, tokens=64, seqs=4)
    errors, scale, same = [], 0.0, True
    for chunks in (FIRST, SECOND):
        inputs = step_inputs(program, chunks, [torch.nan_to_num(cache) for cache in caches], all_rows=chunks is SECOND)
        _, expected = program.run(inputs, read, calls=IN_PLACE)
        caches = [inputs[f"kv_cache_{index}"] for index in range(len(caches))]
        found = step.run(inputs)
        errors.append(float((found - expected).abs().max()))
        scale = max(scale, float(expected.abs().max()))
        same = same and bool((found.argmax(-1) == expected.argmax(-1)).all())
    written = [
        pool.view(-1)[: to_pool(cache).numel()].view(to_pool(cache).shape) for pool, cache in zip(step.pools, caches)
    ]
    cached = max(
        float((a[1:].float() - to_pool(b)[1:].float()).abs().max()) for a, b in zip(written, caches, strict=True)
    )
    kernels = Counter(name.partition("-")[0] for name in step.launched)
    report = {"errors": errors, "scale": scale, "same": same, "cache": cached, "kernels": kernels}
    json.dump({**report, "launches": len(step.code.step) + len(step.code.head)}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
