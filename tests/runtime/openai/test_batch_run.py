"""The requests of an offline batch, which are checked once, over the defaults of what answers them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from batches import responses, row, write_rows

from inferc.runtime.engine.request_output import CompletionOutput, RequestOutput
from inferc.runtime.openai.batch_file import BatchInput, BatchOutput
from inferc.runtime.openai.batch_run import BatchRun, LocalBackend
from inferc.runtime.step.sampling_params import SamplingParams


class Echo:
    """An LLM that answers every prompt at once, and keeps the parameters that it was given."""

    defaults: Mapping[str, Any] = {"max_tokens": 64, "min_tokens": 0}

    def __init__(self) -> None:
        self.seen: list[SamplingParams] = []

    def submit(
        self, prompt: list[int], params: SamplingParams, sink: Callable[[RequestOutput], None], marks: None
    ) -> None:
        self.seen.append(params)
        sink(RequestOutput("a", prompt, [CompletionOutput(0, "b", [5], "stop")], 0))


def test_a_request_is_checked_once_and_over_the_models_defaults(tmp_path: Path) -> None:
    llm: Any = Echo()
    rows = [row("a", {"prompt": [[1], [2], [3]], "min_tokens": 20}), row("b", {"prompt": [1], "stream": True})]
    source = write_rows(tmp_path / "in.jsonl", rows)
    with BatchInput(source) as given, BatchOutput(tmp_path / "out.jsonl", given.fingerprint, False) as output:
        BatchRun(given, output, LocalBackend(llm, tmp_path, 8)).run(given.lines)
    found = responses(tmp_path / "out.jsonl")
    assert found["a"]["status_code"] == 200, found["a"]
    assert "the answers of a batch come whole" in found["b"]["body"]["error"]["message"]
    assert len(llm.seen) == 3 and len(set(map(id, llm.seen))) == 1
    assert (llm.seen[0].min_tokens, llm.seen[0].max_tokens) == (20, 64)
