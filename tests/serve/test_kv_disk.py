"""`inferc serve --kv-disk` as operators use it: stopped, killed, started again, over files that somebody damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import run_inferc
from serving import Server, wait_until

from inferc.client import Client, Delta

PROMPT = [5 + (17 * number * number + number) % 300 for number in range(120)]


def ask(server: Server) -> Delta:
    """The last piece of an answer, with all of its tokens and the usage."""
    with Client(server.address, timeout=60) as client:
        client.wait_until_ready()
        pieces = list(client.generate(PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True))
    ids = tuple(token for piece in pieces for token in piece.token_ids)
    return Delta(pieces[-1].index, "", ids, pieces[-1].finish_reason, usage=pieces[-1].usage)


def blocks_stored(server: Server) -> int:
    with Client(server.address, timeout=60) as client:
        return int(client.loads().blocks_stored)


@pytest.mark.slow
@pytest.mark.quick("terminate")
@pytest.mark.parametrize("ending", ["terminate", "kill"])
def test_a_server_finds_what_the_one_before_it_had(tiny_artifact: Path, tmp_path: Path, ending: str) -> None:
    with Server(tiny_artifact, "--kv-disk", str(tmp_path)) as server:
        first = ask(server)
        wait_until(lambda: blocks_stored(server) == 3, "all full blocks are copied while nobody asks for anything")
        engine = server.engine
        if ending == "terminate":
            server.terminate()
            assert server.process.wait(30) == 0
        else:
            engine.kill()
            engine.wait(10)
    with Server(tiny_artifact, "--kv-disk", str(tmp_path)) as server:
        second = ask(server)
        assert second.token_ids == first.token_ids and second.usage is not None
        assert second.usage.cached_tokens == 96
        with Client(server.address, timeout=60) as client:
            loads = client.loads()
        assert loads.blocks_found_on_disk == 3 and loads.blocks_damaged == 0 and 0 < loads.disk_usage < 1


@pytest.mark.slow
def test_what_was_damaged_is_computed_and_said(tiny_artifact: Path, tmp_path: Path) -> None:
    with Server(tiny_artifact, "--kv-disk", str(tmp_path)) as server:
        first = ask(server)
        server.terminate()
        assert server.process.wait(30) == 0
    (blocks,) = tmp_path.glob("*/group-0")
    with blocks.open("r+b") as file:
        file.write(b"damaged")
    with Server(tiny_artifact, "--kv-disk", str(tmp_path)) as server:
        second = ask(server)
        assert second.token_ids == first.token_ids
        with Client(server.address, timeout=60) as client:
            assert client.loads().blocks_damaged == 1
        assert "is not used" in server.log and "its checksum does not match" in server.log


@pytest.mark.slow
def test_a_second_server_on_the_same_folder_is_refused(tiny_artifact: Path, tmp_path: Path) -> None:
    with Server(tiny_artifact, "--kv-disk", str(tmp_path)):
        refused = run_inferc("serve", tiny_artifact, "--grpc-port", "0", "--http-port", "0", "--kv-disk", tmp_path)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "in use by another engine; give each a folder of its own" in refused.stderr
