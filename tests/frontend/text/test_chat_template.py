"""Golden chats: what transformers makes of conversations by the checkpoint's template, and the runtime after it."""

import json
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import transformers
from random_models import make_random_model

from inferc.chat.calls import CallForm
from inferc.chat.form import ChatForm
from inferc.errors import ArtifactError, RequestError
from inferc.frontend.checkpoint.load import load
from inferc.frontend.text.chat_template import golden_chats
from inferc.frontend.text.text_files import tokenizer_files
from inferc.runtime.text.tokenizer import Text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_random_model("llama", tmp_path / "m", num_hidden_layers=1)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changes}))


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def use_template(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit(folder / "tokenizer_config.json", chat_template=template)


def written(folder: Path, out: Path) -> Text:
    """The runtime's text side of what the frontend wrote."""
    out.mkdir(exist_ok=True)
    for name, data in tokenizer_files(load(folder)).items():
        (out / name).write_bytes(data)
    return Text(out)


def test_the_runtime_makes_of_chats_what_transformers_does(folder: Path, tmp_path: Path) -> None:
    use_template(folder, TEMPLATE)
    text = written(folder, tmp_path / "t")
    golden = json.loads((tmp_path / "t" / "golden_chat.json").read_text())
    form = ChatForm(**golden["form"])
    assert form == ChatForm(tool_calls=None, tools=False)
    assert len(golden["vectors"]) == len(golden_chats(form)) and not golden["depends_on_time"]
    assert golden["begins_with_bos"] == {"text": False, "chat": True}
    assert (golden["stop_token_ids"], golden["turn_end"]) == ([1], 1)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    for row in golden["vectors"]:
        ids = reference.apply_chat_template(
            [said(each) for each in row["messages"]],
            add_generation_prompt=row["add_generation_prompt"],
            return_dict=False,
        )
        assert row["token_ids"] == ids
        assert text.encode_chat(row["messages"], add_generation_prompt=row["add_generation_prompt"]) == ids


def said(message: dict[str, Any]) -> dict[str, Any]:
    """A message as transformers takes it: parts are one text, and nothing is no field (5.17 writes "None" for it)."""
    content = joined(message["content"])
    return {
        **{name: each for name, each in message.items() if name != "content"},
        **({"content": content} if content is not None else {}),
    }


def joined(content: Any) -> Any:
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


CALLS = (
    "{% for call in message.tool_calls %}"
    "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
)
# As Mistral's and Granite's do: what a call is, in the order in which it came.
WHOLE_CALLS = "{% for call in message.tool_calls %}<call>{{ call.function | tojson }} {{ call | tojson }}{% endfor %}"
READS_PARTS = (
    "{% for message in messages %}<|{{ message.role }}|>{% for part in message.content %}[{{ part.text }}]{% endfor %}"
    + CALLS
    + "</s>{% endfor %}"
)
LOOKS_FOR_NONE = (
    "{% for message in messages %}{% if message.content is none %}{% for call in message.tool_calls or [] %}"
    "{{ call.function.name + call.function.arguments }}{% endfor %}{% else %}"
    "{{ message.content + '\n' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (TEMPLATE.replace("</s>", CALLS + "</s>"), ChatForm(tools=False)),
        (TEMPLATE.replace("</s>", WHOLE_CALLS + "</s>"), ChatForm(tools=False)),
        (TEMPLATE.replace("message.content | trim", "message | tojson"), ChatForm(tools=False)),
        (READS_PARTS, ChatForm("parts", tools=False)),
        (READS_PARTS.replace("message.content %}", "message.content[:1] %}"), ChatForm("part", "empty", tools=False)),
        (LOOKS_FOR_NONE, ChatForm("text", "none", "json", calls_beside_text=False, tools=False)),
        (
            TEMPLATE.replace("message.content | trim", "message.content.strip()"),
            ChatForm("text", "empty", None, tools=False),
        ),
    ],
)
def test_parts_and_calls_of_tools_are_written_as_transformers_does(
    folder: Path, tmp_path: Path, template: str, form: ChatForm
) -> None:
    use_template(folder, template)
    text = written(folder, tmp_path / "t")
    golden = json.loads((tmp_path / "t" / "golden_chat.json").read_text())
    assert ChatForm(**golden["form"]) == form
    assert len(golden["vectors"]) == len(golden_chats(form))
    for row in golden["vectors"]:
        assert "None" not in row["text"]
        if any("tool_calls" in each for each in row["messages"]):
            assert "get_weather" in row["text"] and "Zürich" in row["text"]
        assert text.encode_chat(row["messages"], add_generation_prompt=row["add_generation_prompt"]) == row["token_ids"]
    parts = next(row for row in golden["vectors"] if isinstance(row["messages"][0]["content"], list))
    assert ("[Hello, ][world!]" if form.content == "parts" else "Hello, world!") in parts["text"]


def test_the_form_of_calls_is_kept_and_read(folder: Path, tmp_path: Path) -> None:
    calls = (
        "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }} "
        "{{ call.function.arguments | tojson }}</call>{% endfor %}"
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    )
    use_template(folder, TEMPLATE.replace("</s>", calls + "</s>"))
    text = written(folder, tmp_path / "t")
    assert text.call_form == CallForm("<call>", " ", "</call>", "</call><call>")
    edit(tmp_path / "t" / "golden_chat.json", calls={"before": ""})
    with pytest.raises(ArtifactError, match="golden_chat.json: calls: expected an object with before, between, after"):
        Text(tmp_path / "t")


def test_calls_may_have_control_tokens_and_must_be_known(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="tools: the model's chat template does not tell how it writes calls"):
        written(folder, tmp_path / "none").check_calls()
    calls = (
        "{% for call in message.tool_calls or [] %}<s>{{ call.function.name }} "
        "{{ call.function.arguments | tojson }}<done>{% endfor %}"
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    )
    use_template(folder, TEMPLATE.replace("</s>", calls + "</s>"))
    text = written(folder, tmp_path / "control")
    assert text.check_calls().before == "<s>" and list(text.call_tokens.values()) == ["<s>"]


def test_a_template_may_write_any_token_that_has_a_name(folder: Path, tmp_path: Path) -> None:
    edit(folder / "tokenizer_config.json", sep_token="<unk>", extra_special_tokens={"image_token": "</s>"})
    use_template(folder, "{{ sep_token }}{{ image_token }}" + TEMPLATE)
    text = written(folder, tmp_path / "t")
    assert text.render_chat([{"role": "user", "content": "hi"}]).startswith("<unk></s><s><|user|>hi")


@pytest.mark.slow
def test_a_template_that_loses_the_users_words_is_named(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from inferc.compiler.build import compile
    from inferc.config import CompileConfig

    use_template(folder, "{% for message in messages %}{{ message.role }}{% endfor %}")
    compile(folder, tmp_path / "out", CompileConfig(target="reference", certify="none"))
    assert "m: chats will be refused: the model's chat template leaves out what the user says" in caplog.text
    with pytest.raises(RequestError, match="leaves out what the user says, whether it gets a text or a list of parts"):
        Text(tmp_path / "out" / "tokenizer").encode_chat([{"role": "user", "content": "hi"}])


def test_a_template_that_cannot_be_read_is_named(folder: Path, tmp_path: Path) -> None:
    use_template(folder, "{% for message in messages")
    with pytest.raises(RequestError, match="the model's chat template cannot be read: unexpected end of template"):
        written(folder, tmp_path / "t").encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('no chats') }}", "no chats"),
        ("{{ messages[0].nothing.at_all }}", "'dict object' has no attribute 'nothing'"),
    ],
)
def test_a_template_that_refuses_all_conversations_is_named(
    template: str, why: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use_template(folder, template)
    tokenizer_files(load(folder))
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{folder}: the chat template refuses every conversation that was tried ({why}): chats will be refused, plain"
        " prompts work; correct the template if it is to be used"
    )


@pytest.mark.parametrize(
    ("template", "why"),
    [
        pytest.param(
            "{% for message in messages", "cannot be read: unexpected end of template", marks=pytest.mark.slow
        ),
        pytest.param(
            "{% for message in messages %}{{ message.content | nosuch }}{% endfor %}",
            "cannot be read: No filter named",
            marks=pytest.mark.slow,
        ),
        pytest.param("", "leaves out what the user says", marks=pytest.mark.slow),
        ("hello", "leaves out what the user says"),
        ("{{ raise_exception('no chats') }}", "no chats"),
    ],
)
def test_a_template_of_no_use_is_named_once_by_a_compile(
    template: str, why: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from inferc.compiler.build import compile
    from inferc.config import CompileConfig

    use_template(folder, template)
    compile(folder, tmp_path / "out", CompileConfig(target="reference", certify="none"))
    (told,) = [record.getMessage() for record in caplog.records if "chats will be refused" in record.getMessage()]
    assert str(folder) in told and why in told


def test_a_form_that_is_none_is_refused(folder: Path, tmp_path: Path) -> None:
    written(folder, tmp_path / "t")
    path = tmp_path / "t" / "golden_chat.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "form": {"content": "tensor"}}))
    with pytest.raises(ArtifactError, match="golden_chat.json: form: expected an object with content"):
        Text(tmp_path / "t")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("text", "other", "the model's chat template writes '<s><|user|>Hello, wo' where it wrote 'other'"),
        ("token_ids", [1, 2], "are not those of when the model was compiled"),
    ],
)
def test_chats_that_changed_are_refused(folder: Path, tmp_path: Path, name: str, change: Any, message: str) -> None:
    use_template(folder, TEMPLATE)
    written(folder, tmp_path / "t")
    path = tmp_path / "t" / "golden_chat.json"
    golden = json.loads(path.read_text())
    golden["vectors"][0][name] = change
    path.write_text(json.dumps(golden))
    before = set(psutil.Process().children())
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        Text(tmp_path / "t").encode_chat([{"role": "user", "content": "hi"}])
    assert caught.value.__traceback__ is not None, "its frames hold the template"
    assert not set(psutil.Process().children()) - before, "its process has ended all the same"


def test_stop_ids_that_changed_are_refused(folder: Path, tmp_path: Path) -> None:
    text = written(folder, tmp_path / "t")
    text.check_stop_ids([1])
    with pytest.raises(ArtifactError, match=r"texts end at the token ids \[1, 2\], and ended at \[1\] when"):
        text.check_stop_ids([2, 1])


def test_a_template_may_refuse_conversations_and_hold_the_day(folder: Path, tmp_path: Path) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    use_template(folder, refuses + "{{ strftime_now('%d %m %Y') }}" + TEMPLATE)
    written(folder, tmp_path / "t").encode_chat([{"role": "user", "content": "hi"}])
    golden = json.loads((tmp_path / "t" / "golden_chat.json").read_text())
    form = ChatForm(**golden["form"])
    assert len(golden["vectors"]) == len(golden_chats(form)) - 1 and golden["depends_on_time"]


def test_a_turn_that_ends_no_text_is_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    use_template(folder, TEMPLATE.replace("</s>", "<s>"))
    tokenizer_files(load(folder))
    assert "ends an answer with '<s>' (id 0), which ends no text by the model's generation config" in caplog.text
