"""Sample several answers to one prompt, with seeds, stop strings and log probabilities.

python examples/sampling.py OUT
"""

import sys

from inferc import LLM


def main(out: str = "out/tiny-llama") -> None:
    with LLM(out) as llm:
        # Parameters that are not given here take the model's own defaults.
        params = llm.sampling_params(
            n=3, temperature=0.8, top_p=0.95, seed=7, max_tokens=24, stop=("\n\n",), logprobs=1
        )
        answer = llm.generate("def read(self, ", params)[0]
        for output in answer.outputs:
            total = sum(entry.logprob for entry in output.logprobs or ())
            print(f"--- {output.index}: {output.finish_reason}, log probability {total:.2f}\n{output.text}")


if __name__ == "__main__":
    print(__doc__) if "--help" in sys.argv else main(*sys.argv[1:])
