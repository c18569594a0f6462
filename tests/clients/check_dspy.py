"""Print what DSPy's modules make of a server's answers, in its default form and as JSON: check_dspy.py URL MODEL."""

import json
import os
import sys
import tempfile
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks for a list of prices otherwise
os.environ["DSPY_CACHEDIR"] = tempfile.mkdtemp()

import dspy


class Judge(dspy.Signature):  # type: ignore[misc]  # it has no types
    """Say whether the statement is true."""

    statement: str = dspy.InputField()
    verdict: Literal["yes", "no"] = dspy.OutputField()
    certainty: int = dspy.OutputField()


# The model is small, and its answers are held to the form in which DSPy reads them.
FIELDS = r"\[\[ ## verdict ## \]\]\n(yes|no)\n\n\[\[ ## certainty ## \]\]\n[1-9][0-9]\n\n\[\[ ## completed ## \]\]"
REASONED = r"\[\[ ## reasoning ## \]\]\n[a-z]{2,8}( [a-z]{2,8}){2,5}\n\n" + FIELDS


def main(url: str, model: str) -> dict[str, Any]:
    asked: Any = {"api_base": f"{url}/v1", "api_key": "none", "cache": False, "num_retries": 0, "max_tokens": 200}

    def ask(module: Any, adapter: Any, name: str = f"openai/{model}", **options: Any) -> dict[str, Any]:
        lm = dspy.LM(name, temperature=0.0, **asked, **options)
        with dspy.context(lm=lm, adapter=adapter):
            found = module(statement="Two and two are four.")
        return {**dict(found.items()), "usage": dict(lm.history[-1]["usage"])}

    plain: Any = {"extra_body": {"structured_outputs": {"regex": FIELDS}}}
    reasoned: Any = {"extra_body": {"structured_outputs": {"regex": REASONED}}}
    return {
        "predict": ask(dspy.Predict(Judge), dspy.ChatAdapter(), **plain),
        "reasoned": ask(dspy.ChainOfThought(Judge), dspy.ChatAdapter(), **reasoned),
        # A name under which it sends the schema of the answer.
        "json": ask(dspy.Predict(Judge), dspy.JSONAdapter(), f"lm_studio/{model}"),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
