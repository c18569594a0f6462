"""The table of devices."""

import pytest

from inferc.cost import devices
from inferc.cost.devices import GPUS, NAMES, find_device
from inferc.cost.machine import peak_flops
from inferc.errors import ConfigError

ASKED_FOR = ("a100-40g", "a100-80g", "h100", "h200", "b200", "l4", "l40s", "a10g", "rtx4090", "t4")


def test_the_devices() -> None:
    assert NAMES == ("cpu", *ASKED_FOR)
    assert [find_device(name).name for name in ASKED_FOR] == list(ASKED_FOR)
    assert all(device.source for device in GPUS)


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
def test_figures_are_in_their_units(device: devices.Device) -> None:
    assert 1.6e10 <= device.memory_bytes < 2e11
    assert 3e11 <= device.bytes_per_s < 1e13
    assert device.peak("float32") < device.peak("float16") <= device.peak("int8")
    assert 1e12 < device.peak("float32") < 1e14
    assert 10 < device.ridge("float16") < 1000


def test_turing_has_no_bfloat16() -> None:
    t4 = find_device("t4")
    assert t4.peak("bfloat16") == t4.peak("float32") < t4.peak("float16")


def test_an_unknown_device_names_the_known() -> None:
    with pytest.raises(ConfigError) as error:
        find_device("h1000")
    assert str(error.value) == f"unknown device 'h1000'; known: {', '.join(NAMES)}"


@pytest.mark.parametrize(
    ("clock", "word"), [("cpu MHz : 2000.0\nflags : avx512f avx512_bf16 avx512_vnni\n", "clock"), ("", "nominal")]
)
def test_this_machine(clock: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferc.cost.machine.cpuinfo", lambda: clock)
    monkeypatch.setattr("inferc.cost.machine.measure_read", lambda threads: 1e9 * threads)
    monkeypatch.setattr("inferc.cost.devices.available_cores", lambda: 4)
    cpu = find_device("cpu")
    assert cpu.bytes_per_s == 4e9
    assert word in cpu.source
    if clock:  # 4 cores, 2 GHz, 2 units of 16 multiply-adds; pairs of bfloat16, fours of int8
        assert cpu.peak("float32") == 4 * 2e9 * 64
        assert cpu.peak("bfloat16") == 2 * cpu.peak("float32")
        assert cpu.peak("int8") == 4 * cpu.peak("float32")
    else:
        assert cpu.peak("float32") == cpu.peak("bfloat16") == 4 * devices.NOMINAL_CORE_FLOPS


def test_tiles_count() -> None:
    """A product of 16 x 16 outputs over 32 of bfloat16, or 64 of int8, takes 16 cycles."""
    info = "cpu MHz : 2000.0\nflags : avx512f avx512_bf16 avx512_vnni amx_bf16 amx_int8\n"
    rows = 2 * 16 * 16 / 16 * 3 * 2e9
    assert peak_flops(3, "bfloat16", info) == rows * 32 and peak_flops(3, "int8", info) == rows * 64
    assert peak_flops(3, "float32", info) == 3 * 2e9 * 64
