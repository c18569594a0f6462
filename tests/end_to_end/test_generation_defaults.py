"""Requests without sampling parameters get the model's generation defaults on every interface, as in transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from batches import CHAT, COMPLETIONS, responses, row, write_rows
from command_line import run_inferc
from http_calls import request
from random_models import make_random_model
from serving import Server

from inferc import LLM
from inferc.client import Client
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import RequestError
from inferc.runtime.text.tokenizer import Text

pytestmark = pytest.mark.slow

PROMPT = "def add(first"
MESSAGES = [{"role": "user", "content": "hello"}]
NUM_TOKENS = 12


@dataclass(frozen=True)
class Made:
    folder: Path
    artifact: Path
    said: dict[str, Any]  # of its generation_config.json


def of_transformers(folder: Path, ids: list[int], **changes: Any) -> list[int]:
    """Return what transformers' `generate` gives with the folder's own generation config, with changes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = torch.tensor([ids])
    out = model.generate(inputs, attention_mask=torch.ones_like(inputs), pad_token_id=0, **changes)
    return [int(token) for token in out[0, len(ids) :]]


def prompt_ids(folder: Path) -> list[int]:
    return [int(token) for token in transformers.AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]]


def chat_ids(folder: Path) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return list(tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Make a model whose generation defaults change each answer: they ban its tokens, or end the text too early."""
    folder = make_random_model("llama", tmp_path_factory.mktemp("models") / "m")
    said: dict[str, Any] = {"bos_token_id": 0, "do_sample": False, "repetition_penalty": 0.7}
    said["max_new_tokens"] = NUM_TOKENS
    ids = prompt_ids(folder)

    def comes_first(**changes: Any) -> int:
        said.update(changes)
        (folder / "generation_config.json").write_text(json.dumps(said))
        return of_transformers(folder, ids, eos_token_id=[])[0]

    first = comes_first()
    second = comes_first(suppress_tokens=[first])
    third = comes_first(bad_words_ids=[[second]])
    comes_first(eos_token_id=[1, third], min_new_tokens=6)
    out = tmp_path_factory.mktemp("artifacts") / "m"
    compile(folder, out, CompileConfig(certify="none", dtype="float32"))
    return Made(folder, out, said)


@pytest.fixture(scope="module")
def wanted(made: Made) -> list[int]:
    """Return the expected tokens; each field that is taken away gives something else."""
    ids = prompt_ids(made.folder)
    found = of_transformers(made.folder, ids)
    neutral = {"repetition_penalty": 1.0, "max_new_tokens": 30, "suppress_tokens": [300], "bad_words_ids": [[300]]}
    for name, value in {**neutral, "min_new_tokens": 0}.items():
        assert of_transformers(made.folder, ids, **{name: value}) != found, name
    return found


@pytest.fixture(scope="module")
def wanted_of_chat(made: Made) -> list[int]:
    return of_transformers(made.folder, chat_ids(made.folder))


@pytest.fixture(scope="module")
def llm(made: Made) -> Iterator[LLM]:
    with LLM(made.artifact, max_num_seqs=4, num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(made: Made) -> Iterator[Server]:
    with Server(made.artifact) as server:
        yield server


def run(*arguments: str | Path, stdin: str | None = None) -> str:
    """Return what a command prints."""
    done = run_inferc(*arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate_and_chat(llm: LLM, wanted: list[int], wanted_of_chat: list[int]) -> None:
    assert llm.generate(PROMPT)[0].outputs[0].token_ids == wanted
    assert llm.chat(MESSAGES)[0].outputs[0].token_ids == wanted_of_chat
    assert [answer.outputs[0].token_ids for answer in llm.stream(PROMPT)][-1] == wanted


def test_a_banned_token_never_comes(llm: LLM, made: Made) -> None:
    """Whatever else asks for it: it is no matter of a bias."""
    (token,) = made.said["suppress_tokens"]
    plain = llm.sampling_params(banned_token_ids=(), max_tokens=1, min_tokens=0)
    assert llm.generate(PROMPT, plain)[0].outputs[0].token_ids == [token]
    pushed = llm.sampling_params(logit_bias={token: 100.0}, temperature=1.0, max_tokens=40, ignore_eos=True, n=4)
    answer = llm.generate(PROMPT, pushed)[0]
    assert all(token not in output.token_ids and len(output.token_ids) == 40 for output in answer.outputs)


def test_what_leaves_nothing_to_choose_is_refused(llm: LLM) -> None:
    size = llm.text.tokenizer.get_vocab_size()
    for values, message in (
        ({"banned_token_ids": range(size)}, "all tokens are in banned_token_ids"),
        ({"allowed_token_ids": (5,), "banned_token_ids": (5,)}, "allowed_token_ids are all in banned_token_ids"),
        ({"allowed_token_ids": (1, 5), "banned_token_ids": (5,), "min_tokens": 1}, "leave end tokens only"),
        ({"banned_token_ids": (size,)}, f"banned_token_ids: token id {size} is outside of the vocabulary"),
    ):
        values = {name: tuple(value) if isinstance(value, range) else value for name, value in values.items()}
        with pytest.raises(RequestError, match=message):
            llm.generate(PROMPT, llm.sampling_params(**values))


def test_a_servers_answers(server: Server, made: Made, wanted: list[int], wanted_of_chat: list[int]) -> None:
    with Client(server.address) as client:
        assert list(client.complete(PROMPT)[0].token_ids) == wanted
        assert list(client.complete(MESSAGES)[0].token_ids) == wanted_of_chat
        shown = client.model_info().defaults
        assert list(shown.banned_token_ids) == sorted([*made.said["suppress_tokens"], *made.said["bad_words_ids"][0]])
        assert (shown.temperature, shown.max_tokens, shown.min_tokens) == (0.0, NUM_TOKENS, 6)
    body = {"prompt": PROMPT, "return_token_ids": True}
    assert request(server.url, "/v1/completions", body).json["choices"][0]["token_ids"] == wanted
    answer = request(server.url, "/v1/chat/completions", {"messages": MESSAGES, "return_token_ids": True}).json
    assert answer["choices"][0]["token_ids"] == wanted_of_chat
    own = request(server.url, "/v1/completions", {**body, "max_tokens": 3, "banned_token_ids": []}).json["choices"][0]
    assert own["token_ids"] == of_transformers(
        made.folder,
        prompt_ids(made.folder),
        max_new_tokens=3,
        min_new_tokens=3,
        suppress_tokens=[],
        bad_words_ids=[[300]],
    )


@pytest.mark.parametrize("is_served", [False, True])
def test_a_batch(
    is_served: bool, server: Server, made: Made, wanted: list[int], wanted_of_chat: list[int], tmp_path: Path
) -> None:
    rows = [row("r0", {"prompt": PROMPT}, COMPLETIONS), row("r1", {"messages": MESSAGES}, CHAT)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    engine = server.address if is_served else str(made.artifact)
    run("batch", source, "-o", tmp_path / "out.jsonl", "--engine", engine)
    found = responses(tmp_path / "out.jsonl")
    text = Text(made.artifact / "tokenizer")
    first, second = (found[name]["body"]["choices"][0] for name in ("r0", "r1"))
    said = [first["text"], second["message"]["content"]]
    assert said == [text.decode(wanted), text.decode(wanted_of_chat)]


def test_the_command_line(made: Made, wanted: list[int], wanted_of_chat: list[int]) -> None:
    generate = ("generate", made.artifact, "--prompt", PROMPT, "--json")
    assert json.loads(run(*generate))["outputs"][0]["token_ids"] == wanted
    assert json.loads(run(*generate, "--max-tokens", "7"))["outputs"][0]["token_ids"] == wanted[:7]
    (_, answer) = json.loads(run("chat", made.artifact, "--json", stdin="hello\n"))["messages"]
    assert answer["content"] == Text(made.artifact / "tokenizer").decode(wanted_of_chat)


def test_stop_strings(made: Made, tmp_path: Path) -> None:
    """Cut off the text where transformers leaves them at its end."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(made.folder)
    folder = tmp_path / "m"
    folder.mkdir()
    for file in made.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())

    def says(**said: Any) -> str:
        said = {"do_sample": False, "repetition_penalty": 1.3, "max_new_tokens": NUM_TOKENS, "eos_token_id": [], **said}
        (folder / "generation_config.json").write_text(json.dumps(said))
        return str(tokenizer.decode(of_transformers(folder, prompt_ids(folder), tokenizer=tokenizer)))

    stop = says()[4:6]
    whole = says(stop_strings=[stop])
    compile(folder, tmp_path / "out", CompileConfig(certify="none", dtype="float32"))
    with LLM(tmp_path / "out", num_threads=1) as llm:
        output = llm.generate(PROMPT)[0].outputs[0]
        assert (output.stop, output.finish_reason) == (stop, "stop")
        assert len(output.text) > 1 and whole.startswith(output.text + stop)
        assert llm.generate(PROMPT, llm.sampling_params(stop=[]))[0].outputs[0].finish_reason == "length"
    compile(transformers.AutoModelForCausalLM.from_pretrained(folder), tmp_path / "ids", CompileConfig(certify="none"))
    with LLM(tmp_path / "ids", num_threads=1) as llm:  # without a tokenizer there is no text to find them in
        assert len(llm.generate(prompt_ids(folder))[0].outputs[0].token_ids) == NUM_TOKENS
