"""Configs refuse what they cannot mean, and resolve every "auto" once."""

import dataclasses
import logging
import subprocess
import sys
from typing import Any

import pytest

from inferc.config import CompileConfig, ContextLength, EngineConfig, from_dict, parse_bytes
from inferc.errors import ConfigError, UnsupportedError
from inferc.kv_groups import CacheGroup, WindowCacheGroup
from inferc.system.resources import available_cores

CONTEXT = ContextLength(4096, 4096)
GROUPS = (CacheGroup(1000),)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dtype": "bfloat61"}, "dtype is 'bfloat61', expected bfloat16 or float32 or float16 or auto"),
        (
            {"quantize": "int3"},
            (
                "quantize is 'int3', expected int8 or w8a8 or fp8 or int4 or int4-g32 or int4-g64 or int4-g128"
                " or leaving it out"
            ),
        ),
        ({"max_model_len": 0}, "max_model_len is 0, expected at least 1"),
        ({"max_model_len": "long"}, "max_model_len is 'long', expected auto or a whole number"),
        ({"block_size": 24}, "block_size 24 is not a multiple of 16; use 16 or 32"),
        ({"certify": True}, "certify is True, expected auto or full or layers or none"),
        ({"allow_drift": 1}, "allow_drift is 1, expected true or false"),
    ],
)
def test_compile_config_refuses(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_dict(CompileConfig, values)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_threads": 0}, "num_threads is 0, expected at least 1"),
        ({"num_threads": True}, "num_threads is True, expected auto or a whole number"),
        ({"isa": "sse"}, "isa is 'sse', expected avx2 or avx512 or amx or neon or neon_bf16 or auto"),
        ({"max_num_seqs": -1}, "max_num_seqs is -1, expected at least 1"),
    ],
)
def test_engine_config_refuses(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_dict(EngineConfig, values)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (CompileConfig, {"quantize": "int4-g32-a16"}),
        (CompileConfig, {"kv_dtype": "fp8"}),
    ],
)
def test_what_is_not_built_is_refused_by_name(kind: type[Any], values: dict[str, Any]) -> None:
    ((name, value),) = values.items()
    with pytest.raises(UnsupportedError, match="not built yet") as error:
        from_dict(kind, values)
    assert name in str(error.value)
    assert value is True or str(value) in str(error.value)


def test_unknown_keys_raise_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="CompileConfig has no option 'max_len'; did you mean max_model_len"):
        from_dict(CompileConfig, {"max_len": 3})
    with pytest.raises(ConfigError, match="EngineConfig has no option 'zzz'; known: num_threads, isa"):
        from_dict(EngineConfig, {"zzz": 3})


def test_a_token_budget_below_the_sequences_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens 8 is below max_num_seqs 16"):
        EngineConfig(max_num_seqs=16, max_num_batched_tokens=8)


def test_compile_config_resolves_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "inferc.config"):
        resolved = CompileConfig().resolve("bfloat16", CONTEXT)
    assert resolved.dtype == resolved.kv_dtype == "bfloat16"
    assert (resolved.max_model_len, resolved.block_size, resolved.certify) == (4096, 32, "auto")
    assert "max_model_len=4096" in caplog.text
    assert [name for name, value in dataclasses.asdict(resolved).items() if value == "auto"] == ["certify"]


def test_given_values_stay() -> None:
    config = CompileConfig(target="reference", dtype="float32", max_model_len=128, block_size=16, certify="none")
    resolved = config.resolve("bfloat16", CONTEXT)
    assert (resolved.target, resolved.dtype, resolved.max_model_len) == ("reference", "float32", 128)
    assert (resolved.block_size, resolved.certify) == (16, "none")


def test_a_float16_checkpoint_needs_a_choice_where_nothing_computes_in_it() -> None:
    with pytest.raises(UnsupportedError, match="checkpoint's dtype is float16.*--dtype float32"):
        CompileConfig().resolve("float16", CONTEXT)
    assert CompileConfig(dtype="float32").resolve("float16", CONTEXT).dtype == "float32"
    resolved = CompileConfig(target="tensorrt:sm_86").resolve("float16", CONTEXT)
    assert (resolved.dtype, resolved.kv_dtype) == ("float16", "float16")


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len 9000 is more than the 4096 positions"):
        CompileConfig(max_model_len=9000).resolve("bfloat16", CONTEXT)


def test_rope_scaling_extends_the_context_when_asked_to() -> None:
    scaled = ContextLength(4096, 16384)
    assert CompileConfig().resolve("bfloat16", scaled).max_model_len == 4096
    assert CompileConfig(max_model_len=9000).resolve("bfloat16", scaled).max_model_len == 9000
    with pytest.raises(ConfigError, match="more than the 16384 positions the model was made for with its rope scaling"):
        CompileConfig(max_model_len=16385).resolve("bfloat16", scaled)


def test_a_context_that_is_not_known_must_be_given() -> None:
    unknown = ContextLength(None, None)
    with pytest.raises(ConfigError, match="no max_position_embeddings.*give --max-model-len"):
        CompileConfig().resolve("bfloat16", unknown)
    assert CompileConfig(max_model_len=9000).resolve("bfloat16", unknown).max_model_len == 9000


def test_a_cache_of_another_dtype_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="kv_dtype float32 differs from dtype bfloat16.*or use int8"):
        CompileConfig(kv_dtype="float32").resolve("bfloat16", CONTEXT)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_cache_in_int8_goes_with_every_dtype(dtype: str) -> None:
    assert CompileConfig(kv_dtype="int8").resolve(dtype, CONTEXT).kv_dtype == "int8"


def test_engine_config_resolves() -> None:
    resolved = EngineConfig(max_num_seqs=2, num_threads=3).resolve(100, 16, GROUPS)
    assert resolved.num_threads == 3
    assert resolved.kv_memory_bytes == (2 * 7 + 1) * 16 * 1000, "7 blocks of 16 hold 100 tokens, and block 0"
    assert resolved.num_blocks == (15,)
    assert EngineConfig().resolve(100, 16, GROUPS).num_threads == available_cores()


def test_windows_need_less_memory_than_their_sequences_are_long() -> None:
    groups = (*GROUPS, WindowCacheGroup(4000, window=20))
    resolved = EngineConfig(max_num_seqs=2, max_num_batched_tokens=16).resolve(1000, 16, groups)
    assert resolved.num_blocks == (2 * 63 + 1, 2 * 4 + 1), "19 keys before 16 new tokens touch at most 4 blocks"
    assert resolved.kv_memory_bytes == 16 * (127 * 1000 + 9 * 4000)


def test_kv_memory_is_whole_blocks_and_at_least_two() -> None:
    assert EngineConfig(kv_memory_bytes=100_000).resolve(100, 16, GROUPS).kv_memory_bytes == 96_000
    with pytest.raises(ConfigError, match="less than two blocks of 16000 bytes; give at least 32000, or 128000"):
        EngineConfig(kv_memory_bytes=20_000).resolve(100, 16, GROUPS)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 2**20), ("2GiB", 2**31), ("512 MB", 512 * 10**6), ("1.5g", 15 * 10**8), ("3Ki", 3072), ("0", 0)],
)
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 GiBs", "1e9", "2 Pi"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size; write for example 512MiB"):
        parse_bytes(text)


def test_the_runtime_can_import_it() -> None:
    code = "import sys, inferc.config; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
