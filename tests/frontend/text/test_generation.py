"""Tests of generation settings from a model's makers: each is followed to the sampling parameters, or named."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from random_models import make_random_model

from inferc.errors import ConfigError
from inferc.frontend.checkpoint.load import Checkpoint, load, load_module
from inferc.frontend.text import generation
from inferc.frontend.text.generation import eos_token_ids, generation_defaults
from inferc.runtime.step.generation_defaults import generation_defaults as request_defaults
from inferc.runtime.step.sampling_params import SamplingParams, from_request


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_random_model("llama", tmp_path / "m", num_hidden_layers=1)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changes}))


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"eos_token_id": [3, 4], "temperature": 0.6, "top_p": 0.9, "do_sample": True}, [3, 4]),
        ({"eos_token_id": 5}, [5]),
        ({"temperature": 0.6}, [1]),  # from config.json
        (None, [1]),
    ],
)
def test_eos_ids(generation: dict[str, Any] | None, expected: list[int], folder: Path) -> None:
    file = folder / "generation_config.json"
    file.unlink()
    if generation is not None:
        file.write_text(json.dumps({**generation, "transformers_version": "9"}))
    defaults = generation_defaults(load(folder))
    assert eos_token_ids(defaults) == expected
    assert defaults["bos_token_id"] == 0
    assert "transformers_version" not in defaults
    assert defaults.get("temperature") == (generation or {}).get("temperature")


def test_no_eos(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=None)
    assert eos_token_ids(generation_defaults(load(folder))) == []


@pytest.mark.parametrize("generation", [{"transformers_version": "4.40.0"}, None])
def test_what_the_configs_class_has_by_itself_ends_no_text(
    generation: dict[str, Any] | None, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """LlamaConfig's own end is 2, which may be any token of this model's."""
    file, config = folder / "generation_config.json", folder / "config.json"
    file.unlink()
    if generation is not None:
        file.write_text(json.dumps(generation))
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({name: raw[name] for name in raw if not name.endswith("_token_id")}))
    assert load(folder).config.eos_token_id == 2
    assert generation_defaults(load(folder)).keys().isdisjoint(("bos_token_id", "eos_token_id", "pad_token_id"))
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{folder}: neither generation_config.json nor config.json names an end token: texts end at their max_tokens;"
        " add eos_token_id to generation_config.json"
    )
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.generation_config.eos_token_id is None


@pytest.mark.parametrize("eos", [2, None])
def test_an_end_like_the_one_of_the_configs_class_is_kept(
    eos: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file by save_pretrained has the field, as null too where the class has another value."""
    folder = make_random_model("llama", tmp_path / "m", num_hidden_layers=1, eos_token_id=eos)
    (folder / "generation_config.json").unlink()
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == eos
    assert eos_token_ids(generation_defaults(load(folder))) == ([] if eos is None else [eos])
    assert bool(caplog.records) == (eos is None)


def test_a_module_has_the_end_of_its_own_config() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes["num_attention_heads"] = 2
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
    assert generation_defaults(load_module(module))["eos_token_id"] == 2


@pytest.mark.parametrize("name", ["bos_token_id", "pad_token_id"])
def test_an_id_that_is_only_recorded_may_be_of_another_kind(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(folder / "generation_config.json", **{name: [0]})
    assert name not in generation_defaults(load(folder))
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{folder}/generation_config.json: {name} is [0], expected a token id: left out, as it is only recorded"
    )


def test_generation_defaults_of_a_module(folder: Path) -> None:
    module: Checkpoint = load_module(transformers.AutoModelForCausalLM.from_pretrained(folder))
    assert generation_defaults(module)["eos_token_id"] == 1
    (folder / "generation_config.json").write_text("nonsense")
    with pytest.raises(ConfigError, match="not a JSON object"):
        generation_defaults(load(folder))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("eos_token_id", "</s>", '"</s>", expected a token id or a list of them'),
        ("eos_token_id", [1, "</s>"], "expected a token id or a list of them"),
        ("temperature", "hot", '"hot", expected a number'),
        ("top_k", 1.5, "1.5, expected a whole number"),
        ("top_p", [0.9], "expected a number"),
        ("do_sample", "yes", "expected true or false"),
        ("stop_strings", [3], "expected a string or a list of them"),
        ("eos_token_id", True, "expected a token id"),
    ],
)
def test_a_generation_field_of_another_kind(field: str, value: Any, expected: str, folder: Path) -> None:
    edit(folder / "generation_config.json", **{field: value})
    with pytest.raises(ConfigError, match=f"generation_config.json: {field} is .*{expected}") as caught:
        generation_defaults(load(folder))
    assert "\n" not in str(caught.value)


def test_whole_numbers_may_be_written_as_floats(folder: Path) -> None:
    edit(folder / "generation_config.json", top_k=50.0, temperature=1, eos_token_id=[1.0])
    defaults = generation_defaults(load(folder))
    assert (repr(defaults["top_k"]), defaults["temperature"], repr(defaults["eos_token_id"])) == ("50", 1, "[1]")


def test_eos_ids_that_the_model_does_not_have(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(folder / "generation_config.json", eos_token_id=[1, 4000, -1])
    assert eos_token_ids(generation_defaults(load(folder))) == [1]
    assert "eos_token_id 4000, -1 left out" in caplog.text
    edit(folder / "generation_config.json", eos_token_id=4000)
    with pytest.raises(ConfigError, match="eos_token_id is 4000, and the model has the ids 0 to 319"):
        generation_defaults(load(folder))


# ----------------------------------------------------------------------------------------------- every field there is


def checkpoint(folder: Path, values: dict[str, Any], length: int | None = None) -> Any:
    """Return as much of a checkpoint as its generation config needs."""
    (folder / "generation_config.json").write_text(json.dumps(values))
    ids = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps(ids))
    config = SimpleNamespace(vocab_size=320, **ids, max_position_embeddings=length)
    return SimpleNamespace(folder=folder, name="m", config=config, module=None)


def written(folder: Path, values: dict[str, Any], length: int | None = None) -> dict[str, Any]:
    return generation_defaults(checkpoint(folder, values, length))


def params(folder: Path, values: dict[str, Any], **said: Any) -> SamplingParams:
    """Return the parameters of a request that says this, by way of what is written into the artifact."""
    return from_request(said, request_defaults(written(folder, values)))


# A value of each field that is followed, and what it makes of a request that says nothing.
FOLLOWED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
    ({"temperature": 0.7}, {"temperature": 0.7}),
    ({"top_k": 20}, {"top_k": 20}),
    ({"top_p": 0.9}, {"top_p": 0.9}),
    ({"min_p": 0.1}, {"min_p": 0.1}),
    ({"typical_p": 0.2}, {"typical_p": 0.2}),
    ({"do_sample": False, "typical_p": 0.2}, {"temperature": 0.0}),
    ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ({"max_new_tokens": 7}, {"max_tokens": 7}),
    ({"min_new_tokens": 2}, {"min_tokens": 2}),
    ({"min_new_tokens": 20}, {"min_tokens": 20, "max_tokens": 20}),
    ({"stop_strings": ["\n\n", "x"]}, {"stop": ("\n\n", "x")}),
    ({"stop_strings": "\n\n"}, {"stop": ("\n\n",)}),
    ({"suppress_tokens": [7, 5, 7]}, {"banned_token_ids": (5, 7)}),
    ({"bad_words_ids": [[9], [2], [5]], "suppress_tokens": [5]}, {"banned_token_ids": (5, 9)}),
    ({"suppress_tokens": [2]}, {"banned_token_ids": (2,)}),
    ({"bad_words_ids": [[9], [5, 6], [2], [2, 3]]}, {"banned_token_ids": (9,), "bad_words_ids": ((5, 6), (2, 3))}),
    ({"bad_words_ids": []}, {}),
    ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
    (
        {"do_sample": False, "top_k": 5, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 1.3, "max_new_tokens": 7},
        {"temperature": 0.0, "repetition_penalty": 1.3, "max_tokens": 7},
    ),
]


@pytest.mark.parametrize(("values", "wanted"), FOLLOWED)
def test_fields_that_are_followed(
    values: dict[str, Any], wanted: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert params(tmp_path, values) == SamplingParams(**wanted)
    assert not caplog.records


# A value of each field that is not followed which asks for something; all others ask for nothing.
ASKING: dict[str, Any] = {
    "begin_suppress_tokens": [220],
    "constraints": [{"type": "phrasal"}],
    "diversity_penalty": 0.5,
    "dola_layers": "high",
    "encoder_no_repeat_ngram_size": 3,
    "encoder_repetition_penalty": 1.2,
    "epsilon_cutoff": 0.001,
    "eta_cutoff": 0.001,
    "exponential_decay_length_penalty": [10, 1.1],
    "force_words_ids": [[5]],
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "guidance_scale": 1.5,
    "max_length": 100,
    "max_time": 3.0,
    "min_length": 5,
    "num_beam_groups": 2,
    "num_beams": 4,
    "num_return_sequences": 2,
    "penalty_alpha": 0.6,
    "remove_invalid_values": True,
    "sequence_bias": [[[5], -1.0]],
    "token_healing": True,
    "top_h": 0.4,
    "watermarking_config": {"greenlist_ratio": 0.25},
}


@pytest.mark.parametrize("name", sorted(ASKING))
def test_a_field_that_is_not_followed_is_named_with_its_value(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert name not in written(tmp_path, {name: ASKING[name]}, length=4096)
    (record,) = caplog.records
    assert f"generation_config.json: not followed: {name} {json.dumps(ASKING[name])}; answers" in record.getMessage()
    caplog.clear()
    for neutral in (None, *generation.NOT_FOLLOWED[name]):
        written(tmp_path, {name: neutral}, length=4096)
    assert not caplog.records


def test_each_field_of_transformers_is_one_of_three() -> None:
    """A newer transformers may have a new field: decide what it means to an answer."""
    kinds = (set(generation.FOLLOWED), set(generation.NOT_FOLLOWED), set(generation.SILENT))
    for name in vars(transformers.GenerationConfig()):
        assert sum(name in kind for kind in kinds) == 1, name
    assert sum(map(len, kinds)) == len(set.union(*kinds))
    assert ASKING.keys() == generation.NOT_FOLLOWED.keys()
    exercised = {name for values, _ in FOLLOWED for name in values} | {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert exercised == generation.FOLLOWED.keys()


def test_what_transformers_writes_by_itself_asks_for_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    defaults = transformers.GenerationConfig()._get_default_generation_params()
    written(tmp_path, {**defaults, "transformers_version": "4.0", "_from_model_config": True}, length=4096)
    assert not caplog.records


def test_all_that_is_not_followed_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = {"num_beams": 4, "top_h": 0.9, "chat_format": "chatml", "max_window_size": 6144, "use_cache": True}
    written(tmp_path, values)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{tmp_path}/generation_config.json: not followed: num_beams 4, top_h 0.9; not known: chat_format"
        ' "chatml", max_window_size 6144; answers are made without'
    )


@pytest.mark.parametrize(
    ("values", "is_named"),
    [
        ({"max_length": 4096}, False),  # no less than the model takes
        ({"max_length": 20}, False),  # what transformers has by itself
        ({"max_length": 100, "max_new_tokens": 50}, False),  # which goes before it
        ({"max_length": 100}, True),
        ({"min_length": 9, "min_new_tokens": 5}, False),
        ({"min_length": 9}, True),
    ],
)
def test_lengths_with_the_prompt(
    values: dict[str, Any], is_named: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, values, length=4096)
    assert bool(caplog.records) == is_named


def test_ids_that_can_never_be_chosen_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert params(tmp_path, {"suppress_tokens": [-1, 5, 9999]}).banned_token_ids == (5,)
    assert "2 ids of suppress_tokens left out: the model has 320 ids" in caplog.text
    words = params(tmp_path, {"bad_words_ids": [[5, 9999], [5, 6], [-1]]})
    assert (words.bad_words_ids, words.banned_token_ids) == (((5, 6),), ())
    assert "2 words of bad_words_ids left out: the model has 320 ids" in caplog.text


def test_without_a_generation_config_the_models_config_is_read(folder: Path) -> None:
    """Old files have such fields in the model's config, and transformers reads them there."""
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", repetition_penalty=1.2, temperature=None)
    defaults = generation_defaults(load(folder))
    assert (defaults["repetition_penalty"], "temperature" in defaults) == (1.2, False)


# ------------------------------------------------------------------------------------------------- the request's word


def test_a_requests_own_values_go_before_the_models(tmp_path: Path) -> None:
    model: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.3, "max_new_tokens": 9, "min_new_tokens": 4}
    model |= {"stop_strings": ["x"], "suppress_tokens": [5]}
    said = {"temperature": 0.5, "repetition_penalty": 1.0, "stop": ["y"], "banned_token_ids": [7]}
    found = params(tmp_path, model, **said, max_tokens=2)
    assert (found.temperature, found.repetition_penalty, found.max_tokens, found.min_tokens) == (0.5, 1.0, 2, 2)
    assert (found.stop, found.banned_token_ids) == (("y",), (7,))
    assert params(tmp_path, model, stop=[], banned_token_ids=[], min_tokens=0) == params(
        tmp_path, {name: model[name] for name in ("do_sample", "repetition_penalty", "max_new_tokens")}
    )
    assert params(tmp_path, model, min_tokens=30).max_tokens == 30
    assert params(tmp_path, model, allowed_token_ids=[5]).banned_token_ids == ()
    assert params(tmp_path, model, max_tokens=None).max_tokens is None
