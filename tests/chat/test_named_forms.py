"""Forms of calls and reasoning by name: those of published templates, and what is asked for and unknown."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from call_styles import STYLES
from command_line import run_inferc
from rendering import rendered

from inferc.chat.calls import CallForm, find_call_form
from inferc.chat.form import find_form
from inferc.chat.named_forms import (
    CALLS,
    REASONING,
    check_names,
    fault_of,
    named_call_form,
    named_reasoning_form,
)
from inferc.errors import ConfigError

OF_STYLES = {
    "as Qwen3-Coder": "qwen3_coder",
    "as GLM 4.5": "glm45",
    "as MiniMax M2": "minimax_m2",
    "as Kimi K2": "kimi_k2",
    "ids of nine characters alone": "mistral_args",
    "as DeepSeek V3": "deepseek_v3",
    "as DeepSeek V3.1": "deepseek_v31",
}


def trimmed(form: CallForm) -> CallForm:
    """Return a form without the spaces before its first tag, which templates write and models need not."""
    return replace(form, before=form.before.lstrip())


@pytest.mark.parametrize("style", OF_STYLES)
def test_a_name_stands_for_what_templates_of_that_form_write(style: str) -> None:
    render = rendered(STYLES[style][0])
    form = find_form(render)
    assert form is not None
    found = find_call_form(render, form)
    assert found is not None and trimmed(found) == named_call_form(OF_STYLES[style])


@pytest.mark.parametrize("name", CALLS)
def test_every_form_can_be_kept_and_shown(name: str) -> None:
    from inferc.chat.calls import call_form_of

    form = named_call_form(name)
    assert call_form_of(form.to_json()) == form and "NAME" in str(form)


def test_reasoning_has_names_too() -> None:
    assert {(named_reasoning_form(name).opening, named_reasoning_form(name).closing) for name in REASONING} == {
        ("<think>", "</think>"),
        ("[THINK]", "[/THINK]"),
        ("<seed:think>", "</seed:think>"),
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    }


def test_calls_and_reasoning_are_in_channels_together() -> None:
    harmony, hermes = named_call_form("harmony"), named_call_form("hermes")
    channels, think = named_reasoning_form("openai_gptoss"), named_reasoning_form("qwen3")
    assert fault_of(harmony, channels) is fault_of(hermes, think) is fault_of(None, channels) is None
    said = "calls are messages in a channel, and reasoning is not; name harmony for both, or for neither"
    assert fault_of(harmony, think) == fault_of(harmony, None) == said
    assert (fault_of(hermes, channels) or "").startswith("reasoning is a message in a channel, and calls are not")


@pytest.mark.parametrize(
    ("calls", "reasoning", "said"),
    [
        ("qwen_coder", None, "--tool-format qwen_coder: did you mean qwen3_coder?"),
        (None, "deepseek-r1", "--reasoning-format deepseek-r1: did you mean deepseek_r1?"),
        ("pythonicc", None, "--tool-format pythonicc: did you mean pythonic?"),
    ],
)
def test_unknown_names_are_refused(calls: str | None, reasoning: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_names(calls, reasoning)
    options = ("--tool-call-parser", calls) if calls is not None else ("--reasoning-parser", reasoning or "")
    refused = run_inferc("compile", "nothing", "-o", "out", *options)
    assert refused.returncode == 2 and said in refused.stderr
