"""A program: a text with a generation, a choice and branches, of which the model computes each part once.

python examples/program.py OUT
"""

import sys
from typing import Any

from inferc import LLM, gen, program, select


@program
def describe(s: Any, function: str) -> None:
    s += f"def {function}("
    s += gen("parameters", max_tokens=12, temperature=0, stop=")")
    s += "):\n    return "
    s += select("result", ["None", "True", "[]", "self"])
    s += "\n\n# "
    comments = s.fork(3)
    for comment in comments:
        comment += gen("comment", max_tokens=16, temperature=0.8, seed=7, stop="\n")
    comments.join()


def main(out: str = "out/tiny-llama") -> None:
    with LLM(out) as llm:
        for state in describe.batch(llm, [{"function": "read"}, {"function": "add"}]):
            print("---", state.text.strip(), *state["comment"], sep="\n# ")
        stats = llm.stats()
        print(f"{stats.cached_tokens} of {stats.admitted_tokens} prompt tokens were in the cache")


if __name__ == "__main__":
    print(__doc__) if "--help" in sys.argv else main(*sys.argv[1:])
