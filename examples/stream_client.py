"""Stream an answer from a running `inferc serve`.

python examples/stream_client.py [HOST:PORT] [PROMPT]
"""

import sys

from inferc.client import Client


def main(address: str = "127.0.0.1:50051", prompt: str = '"""This module') -> None:
    with Client(address, timeout=60) as client:
        client.wait_until_ready()
        info = client.model_info()
        print(f"{info.model}: {info.model_type}, {info.dtype}, up to {info.max_model_len} tokens")
        print(prompt, end="")
        count = 0
        for piece in client.generate(prompt, max_tokens=48, seed=0):
            count += len(piece.token_ids)
            print(piece.text, end="", flush=True)
        print(f"\n{count} tokens")


if __name__ == "__main__":
    print(__doc__) if "--help" in sys.argv else main(*sys.argv[1:])
