"""Compile a Hugging Face folder and generate with the artifact.

python examples/compile_and_generate.py [MODEL] [OUT]
"""

import sys
from pathlib import Path

import inferc

TINY_LLAMA = Path(__file__).parent / "models" / "tiny-llama"


def main(model: str = str(TINY_LLAMA), out: str = "out/tiny-llama") -> None:
    if not (Path(out) / "engine.json").exists():
        summary = inferc.compile(model, out)
        print(f"compiled {model} in {summary.seconds:.0f} s")
    with inferc.LLM(out) as llm:
        params = inferc.SamplingParams(temperature=0.0, max_tokens=32)
        prompts = ["def main(", "import os\n\nclass ", "Return the number of "]
        for answer in llm.generate(prompts, params):
            print(f"--- {answer.prompt!r}\n{answer.outputs[0].text}")


if __name__ == "__main__":
    print(__doc__) if "--help" in sys.argv else main(*sys.argv[1:])
