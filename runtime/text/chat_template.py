"""The chat template: the model's own Jinja template, rendered in a process that can be killed.

A template comes with the model, so it is hostile input, and its cost shows only when it runs: a few lines can compare
lists for centuries or fill the memory. Every error becomes an error of the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferc.chat.form import ChatForm, form_of
from inferc.errors import RequestError
from inferc.runtime.text.chat_messages import formed
from inferc.runtime.text.template_process import TemplateProcess
from inferc.system.worker_process import WorkerLimits

LOSES_WORDS = (
    "the model's chat template leaves out what the user says, whether it gets a text or a list of parts; send a plain"
    " prompt"
)


class ChatTemplate:
    """The chat template of a model. `facts` holds the texts of its special tokens (tokenizer_config.json).

    form: the form in which it reads messages; found by rendering if it is not given. The first text starts its process.
    """

    def __init__(
        self,
        source: str,
        facts: Mapping[str, Any],
        form: ChatForm | None = None,
        limits: WorkerLimits = WorkerLimits(),  # noqa: B008 (frozen)
    ) -> None:
        tokens = {name: text for name, text in facts.items() if isinstance(text, str)}
        self._process = TemplateProcess(source, tokens, limits)
        self._form = form

    @property
    def form(self) -> ChatForm:
        """The form in which the template reads messages.

        Raises RequestError for a template that omits what the user says in every form.
        """
        if self._form is None:
            found = self._process.ask({"find_form": True})["form"]
            if found is None:
                raise RequestError(LOSES_WORDS)
            self._form = form_of(found)
        return self._form

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt of a conversation.

        messages: as `formed` takes them. Raises RequestError for messages or a template that cannot be rendered, and
        for a template that exceeds its limits of time or memory.
        """
        return self.write(self.values(messages, add_generation_prompt, tools, **variables))

    def values(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> dict[str, Any]:
        """Return the template's variables for a conversation.

        Raises RequestError for invalid messages, and for tools if the template omits them.
        """
        if tools and not self.form.tools:
            raise RequestError(
                "tools: the model's chat template leaves them out; leave them out, or say them in a message"
            )
        return {
            **variables,
            "messages": formed(messages, self.form),
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
        }

    def write(self, values: Mapping[str, Any]) -> str:
        """Return the text that the template writes with these variables."""
        return str(self._process.ask({"values": values})["text"])

    def check(self) -> None:
        """Find the template's form.

        Raises RequestError for an unreadable template, or one that omits user text in every form.
        """
        self._process.ask({})
        _ = self.form

    def close(self) -> None:
        """End the template's process; the next text starts it again."""
        self._process.close()
