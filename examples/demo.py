"""Run the demo of `make demo`: compile the shipped model, generate, serve, stream from a client, stop.

python examples/demo.py [OUT]
"""

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import stream_client

MODEL = Path(__file__).parent / "models" / "tiny-llama"
PROMPT = '"""This module'
INFERC = [sys.executable, "-m", "inferc"]


def run(*arguments: str) -> None:
    print("\n$", shlex.join(["inferc", *arguments]), flush=True)
    subprocess.run([*INFERC, *arguments], check=True)


def serve_and_stream(out: str) -> None:
    print(f"\n$ inferc serve {out} --grpc-port 0", flush=True)
    command = [*INFERC, "serve", out, "--grpc-port", "0", "--http-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        ready = server.stdout.readline().strip()
        if not ready.startswith("ready"):
            sys.exit(f"the server did not start; see for yourself: inferc serve {out}")
        print(ready)
        address = ready.split("grpc=")[1].split()[0]
        print(f"\n$ python examples/stream_client.py {address}", flush=True)
        stream_client.main(address, PROMPT)
        server.send_signal(signal.SIGTERM)
        print(f"\nserver stopped, exit code {server.wait(timeout=60)}")


def main(out: str = "out/tiny-llama") -> None:
    run("compile", str(MODEL.relative_to(Path.cwd()) if MODEL.is_relative_to(Path.cwd()) else MODEL), "-o", out)
    run("generate", out, "--prompt", PROMPT, "--max-tokens", "48", "--seed", "0")
    serve_and_stream(out)
    print("\nNext, in this folder:")
    print("  source .venv/bin/activate")
    print(f"  inferc chat {out}                     talk with it: What is the `zipfile` module for?")
    print(f"  inferc inspect {out}                  what an artifact holds; {out}/graph has every pass as text")
    print(f"  inferc eval {out} --text examples/models/eval.txt")
    print(
        "  inferc compile YOUR_MODEL -o out/yours        a Hugging Face folder of your own; then `inferc serve"
        " out/yours`"
    )


if __name__ == "__main__":
    print(__doc__) if "--help" in sys.argv else main(*sys.argv[1:])
