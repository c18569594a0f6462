"""The page at `/` in a real browser: a person can chat, see what goes on, and read what the compiler did."""

import difflib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import Watched, chromium
from command_line import run_inferc
from http_calls import request
from observability import ALERT_RULES
from playwright.sync_api import Browser, Page, expect
from serving import Server, wait_until
from thinking import BEGUN, make_thinking

from inferc.client.scrape import Change
from inferc.client.scrape import Page as MetricsPage
from inferc.compiler import build
from inferc.config import CompileConfig
from inferc.serve.observe.metrics_page import METRICS, SERVER_METRICS

pytestmark = [pytest.mark.long, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
WEB = ROOT / "serve" / "http" / "web"
SIZES = {"wide": {"width": 1280, "height": 900}, "narrow": {"width": 390, "height": 844}}
PROMPT = "class Reader:\n    def __init__(self"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return tiny-llama as it ships, quantized, so that its certificate has a budget of every kind."""
    out = tmp_path_factory.mktemp("artifacts") / "tiny-llama"
    source = ROOT / "examples" / "models" / "tiny-llama"
    done = run_inferc("compile", source, "-o", out, "--quantize", "int8", "--certify", "layers")
    assert done.returncode == 0, done.stderr
    with Server(out) as server:
        yield server


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Watched]]:
    """Opens pages, and looks in the end whether any of them complained or asked somebody else."""
    opened: list[tuple[Watched, str]] = []

    def open_(url: str, tab: str = "", **options: Any) -> Watched:
        context = browser.new_context(**{"viewport": SIZES["wide"], **options})
        context.set_default_timeout(20_000)
        watched = Watched(context.new_page())
        watched.page.goto(f"{url}/{'#' + tab if tab else ''}")
        opened.append((watched, url))
        return watched

    yield open_
    for watched, url in opened:
        others = [each for each in watched.asked if not each.startswith((url, "data:"))]
        watched.page.context.close()
        assert not watched.errors
        assert not others, "the page asks somebody else"


def chat(page: Page, text: str, **parameters: object) -> None:
    expect(page.locator("#mode-chat")).to_be_enabled()
    if not page.locator("#parameter-temperature").is_visible():
        page.click("#settings summary")  # folded where the window is narrow
    for name, value in parameters.items():
        page.fill(f"#parameter-{name}", str(value))
    page.fill("#chat-input", text)
    page.press("#chat-input", "Enter")


def answered(page: Page) -> str:
    """The last answer, when it is whole."""
    expect(page.locator(".message.assistant").last.locator(".facts")).to_contain_text(" out")
    return page.locator(".message.assistant .words").last.text_content() or ""


# ------------------------------------------------------------------------------------------------ playground


def test_a_person_can_chat_and_gets_what_the_interface_gives(
    shipped: Server, open_page: Callable[..., Watched]
) -> None:
    page = open_page(shipped.url).page
    chat(page, PROMPT, temperature=0, max_tokens=40)
    first = answered(page)
    messages: list[dict[str, str]] = [{"role": "user", "content": PROMPT}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 40}
    expected = request(shipped.url, "/v1/chat/completions", body).json["choices"][0]["message"]["content"]
    assert len(first) > 20 and first == expected
    facts = page.locator(".facts").last.text_content() or ""
    rate = r"(?: · [\d,.]+ tokens/s)?"  # there is none where a busy machine brings all of them in one piece
    assert re.search(rf"first token after [\d.]+ m?s{rate} · \d+ tokens in.*, \d+ out · ended by itself", facts)

    # The conversation goes on, and the second answer knows the first.
    page.click(".system summary")
    page.fill("#system", "Be brief.")
    chat(page, "And now?")
    expect(page.locator(".message")).to_have_count(4)
    second = answered(page)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And now?"}]
    messages.insert(0, {"role": "system", "content": "Be brief."})
    assert second == request(shipped.url, "/v1/chat/completions", body).json["choices"][0]["message"]["content"]

    # Again from an earlier answer: what followed is gone.
    page.locator(".message.assistant").first.get_by_text("Answer again").click()
    expect(page.locator(".message")).to_have_count(2)
    page.locator(".message.user").get_by_text("Edit").click()
    expect(page.locator("#chat-input")).to_have_value(PROMPT)
    expect(page.locator(".message")).to_have_count(0)


def test_reasoning_is_shown_apart(tiny_llama_folder: Path, tmp_path: Path, open_page: Callable[..., Watched]) -> None:
    make_thinking(tiny_llama_folder, tmp_path / "model", BEGUN, "token")
    build.compile(tmp_path / "model", tmp_path / "out", CompileConfig(certify="none"))
    with Server(tmp_path / "out") as server:
        page = open_page(server.url).page
        page.click("#view-tokens")
        chat(page, PROMPT, temperature=0, max_tokens=40, top_logprobs=1)
        said = answered(page)
        body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 40}
        message = request(server.url, "/v1/chat/completions", body).json["choices"][0]["message"]
        thoughts = page.locator(".message.assistant .thoughts")
        assert thoughts.locator("summary").text_content() == "Reasoning" and said == (message["content"] or "")
        assert thoughts.locator(".thought").text_content() == message["reasoning"]
        thoughts.locator("summary").click()
        expect(thoughts.locator(".thought")).to_be_visible()


def test_tokens_show_their_alternatives(shipped: Server, open_page: Callable[..., Watched]) -> None:
    page = open_page(shipped.url).page
    page.click("#view-tokens")
    chat(page, PROMPT, temperature=0, max_tokens=40, top_logprobs=3)
    answered(page)
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 40}
    reply = request(shipped.url, "/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 3}).json
    expected = reply["choices"][0]["logprobs"]["content"]

    def shown() -> list[list[str]]:
        rows = page.locator("#tip tr").all()
        return [[cell.text_content() or "" for cell in row.locator("td").all()] for row in rows]

    def rows_of(token: dict[str, Any]) -> list[list[str]]:
        found = []
        for each in token["top_logprobs"]:
            mark = "▸" if each["token"] == token["token"] else ""
            share = f"{100 * 2.718281828459045 ** each['logprob']:.1f} %"
            found.append([mark, each["token"].replace(" ", "␣"), share, "", f"{each['logprob']:.3f}"])
        return found

    tokens = page.locator(".message.assistant .token")
    tokens.nth(1).hover()
    expect(page.locator("#tip")).to_be_visible()
    assert shown() == rows_of(expected[1])
    page.mouse.move(2, 2)
    expect(page.locator("#tip")).to_be_hidden()

    # By the keyboard: one stop for all tokens, arrows from there, and Escape.
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert shown() == rows_of(expected[2])
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()
    assert page.locator(".message.assistant .token[tabindex='0']").count() == 1

    before = tokens.nth(1).evaluate("node => getComputedStyle(node).backgroundColor")
    page.check("#parameter-colours")
    unsure = [each for each in range(len(expected)) if expected[each]["logprob"] < -0.2]
    assert tokens.nth(unsure[0]).evaluate("node => getComputedStyle(node).backgroundColor") != before


@pytest.mark.parametrize(
    ("text", "tokens", "shown"),
    [
        ("ab c", ["ab", " c"], ["ab", " c"]),
        ("ab c", ["ab", " c", "</s>"], ["ab", " c"]),  # which has no text
        ("aé b", ["a", "\\xc3", "\\xa9", " b"], ["a", "é", " b"]),
        ("é", ["\\xc3", "\\xa9"], ["é"]),
        ("aa", ["a", "a"], ["a", "a"]),
    ],
)
def test_each_token_of_a_chunk_is_shown(
    server: Server, open_page: Callable[..., Watched], text: str, tokens: list[str], shown: list[str]
) -> None:
    """If the page is late, a chunk has several tokens."""
    page = open_page(server.url).page
    found = page.evaluate(
        """async ([text, tokens]) => {
            const { TokenText } = await import("/web/tokens.js");
            const node = document.createElement("div");
            new TokenText(node).add(text, tokens.map((token) => ({ token, logprob: -1, top: [] })));
            return [...node.querySelectorAll(".token")].map((each) => each.textContent);
        }""",
        [text, tokens],
    )
    assert found == shown


def test_a_text_is_completed_and_taken_on(shipped: Server, open_page: Callable[..., Watched]) -> None:
    page = open_page(shipped.url).page
    expect(page.locator("#mode-chat")).to_be_enabled()
    page.click("#mode-completion")
    for name, value in {"temperature": "0", "max_tokens": "300", "stop": "\\n\\n"}.items():
        page.fill(f"#parameter-{name}", value)
    page.fill("#completion-input", PROMPT)
    page.press("#completion-input", "Control+Enter")
    page.wait_for_selector("#take:not([hidden])")
    found = page.locator("#completion-output .words").text_content() or ""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 300, "stop": ["\n\n"]}
    expected = request(shipped.url, "/v1/completions", body).json["choices"][0]["text"]
    assert len(found) > 10 and found == expected
    page.click("#take")
    expect(page.locator("#completion-input")).to_have_value(PROMPT + found)


MARKDOWN = """# Title

Some *soft*, **strong** and `code < b` text, https://example.com/a_b and [a link](https://example.com).
<script>alert(1)</script> [bad](javascript:alert(1)) 2 * 3 * 4, snake_case_name

1. one
   - inner
   - **two**
2. second

> quoted

| a | b |
|---|--:|
| 1 | `2|3` |

```python
def f():
    return "<b>"
```

---
```sh
unfinished"""
TEXT = (
    "<p>Some <em>soft</em>, <strong>strong</strong> and <code>code &lt; b</code> text,"
    ' <a href="https://example.com/a_b">https://example.com/a_b</a> and <a href="https://example.com">a link</a>.\n'
    "&lt;script&gt;alert(1)&lt;/script&gt; [bad](javascript:alert(1)) 2 * 3 * 4, snake_case_name</p>"
)
ELEMENTS = [
    "<h3>Title</h3>",
    TEXT,
    "<ol><li>one<ul><li>inner</li><li><strong>two</strong></li></ul></li><li>second</li></ol>",
    "<blockquote><p>quoted</p></blockquote>",
    "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>`2</td></tr></tbody></table>",
    '<pre><code>def f():\n    return "&lt;b&gt;"</code></pre>',
    "<hr>",
    "<pre><code>unfinished</code></pre>",
]


def test_markdown_becomes_elements_and_never_markup(server: Server, open_page: Callable[..., Watched]) -> None:
    page = open_page(server.url).page
    script = """async (text) => {
        const { rendered } = await import("/web/markdown.js");
        return rendered(text).map((node) => {
            const shown = node.querySelector("table, pre") || node;
            for (const each of [shown, ...shown.querySelectorAll("*")]) {
                for (const { name } of [...each.attributes]) if (name !== "href") each.removeAttribute(name);
            }
            return shown.outerHTML;
        });
    }"""
    assert page.evaluate(script, MARKDOWN) == ELEMENTS
    # However it is cut while it grows, and whatever a model writes, it is read in no time worth waiting for.
    page.evaluate(
        "async (text) => { const { rendered } = await import('/web/markdown.js');"
        " for (let end = 0; end <= text.length; end += 1) rendered(text.slice(0, end));"
        " for (const hostile of ['**', '[', '`', '| ', '- ', '> ', '_a']) rendered(hostile.repeat(5000)); }",
        MARKDOWN,
    )


def test_conversations_are_kept_opened_saved_and_forgotten(
    shipped: Server, open_page: Callable[..., Watched], tmp_path: Path
) -> None:
    page = open_page(shipped.url).page
    chat(page, "First question", temperature=0, max_tokens=8)
    first = answered(page)
    page.click("#clear")
    chat(page, "Second question", temperature=0, max_tokens=8)
    answered(page)
    page.reload()
    titles = page.locator("#kept .link")
    expect(titles).to_have_text(["Second question", "First question"])
    titles.nth(1).click()
    expect(page.locator(".message.user .words")).to_have_text("First question")
    assert (page.locator(".message.assistant .markdown").text_content() or "").split() == first.split()
    with page.expect_download() as saved:
        page.click("#export-json")
    saved.value.save_as(tmp_path / "conversation.json")
    found = json.loads((tmp_path / "conversation.json").read_text())
    assert [each["content"] for each in found["messages"]] == ["First question", first]
    with page.expect_download() as saved:
        page.click("#export-markdown")
    assert "First question" in Path(saved.value.path()).read_text()
    chat(page, "More", temperature=0, max_tokens=8)
    answered(page)
    expect(titles).to_have_text(["First question", "Second question"])
    page.get_by_role("button", name="Forget: Second question").click()
    expect(titles).to_have_text(["First question"])
    page.reload()
    expect(titles).to_have_text(["First question"])


def test_what_is_sent_before_the_model_is_known_is_sent_then(server: Server, open_page: Callable[..., Watched]) -> None:
    page = open_page(server.url).page
    held: list[Any] = []
    page.goto("about:blank")  # or a request of the page before could be the one held
    page.route("**/tokenizer_info*", lambda route: held.append(route))
    with page.expect_request("**/tokenizer_info*"):
        page.goto(server.url)
    chat(page, "Early", max_tokens=8, temperature=0)
    expect(page.locator("#chat-input")).to_have_value("Early")
    expect(page.locator(".message")).to_have_count(0)
    held[0].continue_()
    answered(page)
    expect(page.locator(".message.user .words")).to_have_text("Early")


def test_an_answer_can_be_stopped(server: Server, open_page: Callable[..., Watched]) -> None:
    page = open_page(server.url).page
    server.engine.suspend()  # or the answer may be whole before anybody can stop it
    try:
        chat(page, "Go on", max_tokens=200, temperature=1)
        page.locator(".stop:visible").click(timeout=10_000)
        expect(page.locator(".facts").last).to_contain_text("stopped")
    finally:
        server.engine.resume()
    expect(page.locator("#chat-form button[type=submit]")).to_be_visible()

    def is_idle() -> bool:
        metrics = MetricsPage.parse(request(server.url, "/metrics").body.decode())
        return metrics.sum("inferc_requests_open") == 0 and metrics.sum("inferc_kv_usage_ratio") == 0

    wait_until(is_idle, "its blocks are free")


def test_a_refusal_is_shown_and_not_part_of_the_conversation(server: Server, open_page: Callable[..., Watched]) -> None:
    watched = open_page(server.url)
    page = watched.page
    text = "<img src=x onerror=alert(1)>" + " far too long" * 100
    chat(page, text)
    expect(page.locator(".message .error")).to_contain_text("the prompt has")
    assert page.locator(".message.user .words").text_content() == text
    assert page.locator(".message img").count() == 0
    watched.errors.clear()  # the browser's own line about the status 400
    sent: list[Any] = []
    page.on("request", lambda each: sent.append(each.post_data_json) if "chat/completions" in each.url else None)
    chat(page, "Once more", max_tokens=8, temperature=0)
    answered(page)
    (body,) = sent
    assert body["messages"] == [{"role": "user", "content": "Once more"}]
    assert body["logprobs"] is True and body["top_logprobs"] == 5 and "top_p" not in body

    # What no request may have is said at the field itself.
    page.fill("#parameter-temperature", "-1")
    page.fill("#chat-input", "Hi")
    page.press("#chat-input", "Enter")
    expect(page.locator("#parameter-temperature")).to_be_focused()
    assert len(sent) == 1


@pytest.mark.parametrize("kind", ["curl", "python"])
def test_the_request_can_be_taken_elsewhere(kind: str, server: Server, open_page: Callable[..., Watched]) -> None:
    page = open_page(server.url, permissions=["clipboard-read", "clipboard-write"]).page
    expect(page.locator("#mode-chat")).to_be_enabled()
    page.fill("#chat-input", 'It\'s "quoted"')
    page.fill("#parameter-top_k", "3")
    page.click(f"#copy-{kind}")
    expect(page.locator(f"#copy-{kind}")).to_have_text("Copied")
    text = page.evaluate("() => navigator.clipboard.readText()")
    if kind == "curl":
        assert text.startswith(f"curl -N {server.url}/v1/chat/completions")
        body = json.loads(text.split("-d '", 1)[1][:-1].replace("'\\''", "'"))
        assert body["messages"][0]["content"] == 'It\'s "quoted"' and body["top_k"] == 3
    else:
        compile(text, "snippet", "exec")
        assert f'base_url="{server.url}/v1"' in text and 'extra_body={"top_k": 3}' in text


# ------------------------------------------------------------------------------------------------------ keys


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(
    tiny_artifact: Path, tmp_path: Path, open_page: Callable[..., Watched]
) -> None:
    keys = tmp_path / "keys.json"
    key = run_inferc("keys", "create", keys, "alice").stdout.split()[-1]
    assert key.startswith("ik-")
    with Server(tiny_artifact, "--api-keys", str(keys)) as server:
        assert request(server.url, "/artifact").status == 401
        watched = open_page(server.url)
        page = watched.page
        expect(page.locator("#key-dialog")).to_be_visible()
        page.fill("#key-input", "ik-wrong")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#key-why")).to_contain_text("does not know this key")
        page.fill("#key-input", key)
        page.get_by_role("button", name="Use it").click()
        chat(page, "Hi", max_tokens=4, temperature=0)
        answered(page)
        assert key not in page.evaluate("() => JSON.stringify(localStorage)")
        page.reload()
        expect(page.locator("#mode-chat")).to_be_enabled()
        expect(page.locator("#key-dialog")).to_be_hidden()
        page.click("#key-button")
        page.get_by_role("button", name="Forget it").click()
        page.wait_for_function("() => sessionStorage.length === 0")
        page.close()
        assert all("401" in each for each in watched.errors)
        watched.errors.clear()


# ------------------------------------------------------------------------------------------------- dashboard


def test_the_dashboard_shows_what_goes_on(server: Server, open_page: Callable[..., Watched]) -> None:
    page = open_page(server.url, "dashboard").page
    page.wait_for_selector("#tiles .tile")
    body = {"prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True}
    assert request(server.url, "/v1/completions", body).status == 200
    for title in ("Time to first token (TTFT)", "Time between tokens (TBT)"):
        chart = page.locator("figure", has=page.get_by_role("heading", name=title))
        expect(chart.locator(".legend b").first).to_have_text(re.compile(r"^[\d.]+ m?s$"))
        expect(chart.locator("path.stroke.line0").last).to_have_attribute("d", re.compile("^M[\\d.]+ [\\d.]+h"))
    chart = page.locator("figure", has=page.get_by_role("heading", name="Throughput"))
    expect(chart.locator(".legend b").first).to_have_text(re.compile(r"^[\d.]+$"))
    expect(page.locator(".tile", has_text="Goodput").locator("dd")).to_contain_text("100 %")
    outcomes = page.locator("#counts section", has_text="Requests that are over")
    expect(outcomes.locator("dt", has_text="length")).to_be_visible()
    # Earlier values by the keyboard.
    chart.locator("svg.chart").focus()
    page.keyboard.press("ArrowLeft")
    expect(chart.locator(".reading")).to_contain_text(re.compile(r"^\d+ s ago: output "))
    page.click("#pause")
    expect(page.locator("#pause")).to_have_text("Go on")


def test_the_dashboard_begins_with_what_the_server_has_kept(server: Server, open_page: Callable[..., Watched]) -> None:
    page = open_page(server.url).page
    expect(page.locator("#mode-chat")).to_be_enabled()  # the model is known, whose name the metrics have
    (model,) = MetricsPage.parse(request(server.url, "/metrics").body.decode()).models
    now, tokens = 1_000_000, 'inferc_output_tokens_total{model_name="%s"} %d'
    pages = [f"# at {now - ago}\n{tokens % (model, count)}" for ago, count in ((1800, 0), (1790, 500), (1780, 600))]
    kept = "\n".join([f"# now {now}", *pages, ""])
    page.route("**/metrics/history", lambda route: route.fulfill(body=kept, content_type="text/plain"))
    page.reload()
    page.click("[data-tab=dashboard]")
    page.select_option("#span", "3600")
    expect(page.locator("#dashboard-note")).to_have_text(re.compile(r"All that the server has kept: 1[78]\d\d s"))
    chart = page.locator("figure", has=page.get_by_role("heading", name="Throughput"))
    page.click("#pause")
    chart.locator("svg.chart").focus()
    expect(chart.locator("path.stroke.line0").first).to_have_attribute("d", re.compile("^M"))
    for _ in range(60):  # to the first of them
        page.keyboard.press("ArrowLeft")
    expect(chart.locator(".reading")).to_contain_text(re.compile(r"^1[78]\d\d s ago: output 50,"))


def test_the_dashboard_lists_the_requests_that_are_open(server: Server, open_page: Callable[..., Watched]) -> None:
    page = open_page(server.url, "dashboard").page
    found = page.locator("#open")
    expect(found).to_have_text("None.")
    server.engine.suspend()  # or the request may be over before anybody can see it
    try:
        page.evaluate(
            """() => { fetch("/v1/completions", { method: "POST", headers: { "content-type": "application/json" },
                body: JSON.stringify({ prompt: [5, 6, 7], max_tokens: 2, priority: 4 }) }); }"""
        )
        cells = found.locator("tbody tr > *")
        expect(cells.nth(0)).to_have_text(re.compile("^cmpl-"))
        expect(found.locator("tbody tr")).to_have_count(1)
        texts = [each.text_content() or "" for each in cells.all()]
        assert texts[1] == "waiting or prefill" and texts[3:] == ["3", "0", "completion", "tiny-llama", "4"]
        assert re.fullmatch(r"[\d.]+ m?s", texts[2])
    finally:
        server.engine.resume()
    expect(found).to_have_text("None.")

    row = {"kind": "chat", "model": "m", "state": "decode", "prompt_tokens": 3, "output_tokens": 1200, "key": "alice"}
    rows = [{**row, "id": f"r{number}", "age_seconds": 90 - number, "priority": 0} for number in range(50)]
    page.route("**/requests", lambda route: route.fulfill(json={"num_open": 1073, "requests": rows}))
    expect(found).to_contain_text("and 1,023 more")
    expect(found.locator("tbody tr")).to_have_count(50)
    expect(found.locator("thead th")).to_have_text(
        ["Request", "State", "Age", "Prompt", "Output", "Kind", "Model", "Key"]
    )
    expect(found.locator("tbody tr").first).to_have_text("r0decode90 s31,200chatmalice")


def test_it_uses_metrics_that_there_are() -> None:
    source = (WEB / "dashboard.js").read_text() + (WEB / "prometheus.js").read_text()
    names = set(re.findall(r"\binferc_\w+", source))
    assert len(names) > 15 and names <= {each.name for each in METRICS} | {name for name, *_ in SERVER_METRICS}


def test_its_limits_are_those_of_the_alerts() -> None:
    limits = re.search(
        r"const LIMITS = \{ ttft: ([\d.]+), kv: ([\d.]+), goodput: ([\d.]+), memory: [\d.]+ \}",
        (WEB / "dashboard.js").read_text(),
    )
    assert limits
    rules = " ".join(rule.expr for rule in ALERT_RULES)
    for name, compare, value in zip(
        ("time_to_first_token", "kv_usage_ratio", "requests_good"), "><>", limits.groups(), strict=False
    ):
        assert re.search(rf"inferc_{name}.*[<>]=? {value}\b", rules), (name, compare)


def test_quantiles_and_rates_are_those_that_inferc_top_shows(server: Server, open_page: Callable[..., Watched]) -> None:
    texts = [request(server.url, "/metrics").body.decode()]
    for count in (3, 30, 60):
        request(server.url, "/v1/completions", {"prompt": [5, 6, count], "max_tokens": count, "ignore_eos": True})
    texts.append(request(server.url, "/metrics").body.decode())
    before, after = (MetricsPage.parse(text, at) for text, at in zip(texts, (100.0, 103.5), strict=True))
    (model,) = after.models
    change = Change(before, after, model)
    names = ("inferc_time_to_first_token_seconds", "inferc_time_between_tokens_seconds")
    expected = [
        *[change.quantile(name, share) for name in names for share in (0.5, 0.9, 0.99)],
        change.rate("inferc_output_tokens_total"),
        change.share("inferc_requests_good_total", "inferc_requests_judged_total"),
        change.now("inferc_sequences_max"),
        change.busy,
        change.batch_fill,
    ]
    found = open_page(server.url).page.evaluate(
        """async ([before, after, model, names]) => {
            const { Change, parse } = await import("/web/prometheus.js");
            const change = new Change(parse(before, 100), parse(after, 103.5), model);
            return [
                ...names.flatMap((name) => [0.5, 0.9, 0.99].map((share) => change.quantile(name, share))),
                change.rate("inferc_output_tokens_total"),
                change.share("inferc_requests_good_total", "inferc_requests_judged_total"),
                change.now("inferc_sequences_max"), change.busy, change.batchFill, change.state,
            ];
        }""",
        [*texts, model, list(names)],
    )
    assert found.pop() == change.state == "serving"
    assert found == pytest.approx(expected)


def test_a_server_that_is_away_is_said_and_found_again(tiny_artifact: Path, open_page: Callable[..., Watched]) -> None:
    with Server(tiny_artifact) as server:
        watched = open_page(server.url, "dashboard")
        watched.page.wait_for_selector("#tiles .tile")
        port = server.url.rpartition(":")[2]
    expect(watched.page.locator("#banner")).to_contain_text("does not answer")
    with Server(tiny_artifact, "--http-port", port):
        expect(watched.page.locator("#banner")).to_be_hidden()
        expect(watched.page.locator("#state")).to_have_text("serving")
    assert all("ERR_" in each for each in watched.errors), watched.errors
    watched.errors.clear()


# -------------------------------------------------------------------------------------------------- artifact


def test_the_artifact_tells_its_story(shipped: Server, open_page: Callable[..., Watched]) -> None:
    story = request(shipped.url, "/artifact").json
    page = open_page(shipped.url, "artifact").page
    page.wait_for_selector("text=Compiled with")
    rows = page.locator(".card", has=page.get_by_role("heading", name="Passes")).locator("tbody tr:not(.panel)")
    changed = [row for index, row in enumerate(story["passes"]) if row["rewrites"] or not index]
    assert rows.count() == len(changed) < len(story["passes"])
    page.get_by_text("that found nothing to do").click()
    assert rows.count() == len(story["passes"])

    page.get_by_role("button", name="fuse_silu_mul", exact=True).click()
    program = page.get_by_label("What fuse_silu_mul changed")
    expect(program.locator(".added").first).to_contain_text("inferc.silu_mul(")
    expect(program.locator(".removed").first).to_contain_text("aten.silu(")
    (fused,) = (row for row in story["passes"] if row["name"] == "fuse_silu_mul")
    assert program.locator(".added").count() == fused["rewrites"]

    certificate = page.locator(".card", has=page.get_by_role("heading", name="Certificate"))
    expect(certificate.locator(".badge")).to_have_text("within all budgets")
    expect(certificate).to_contain_text("int8: KL up to")
    assert certificate.locator("tbody tr").count() == len(story["certificate"]["rows"]) > 5
    assert certificate.locator(".budget").count() == sum(row["use"] is not None for row in story["certificate"]["rows"])
    memory = page.locator(".card", has=page.get_by_role("heading", name="Memory"))
    expect(memory.locator(".stack span")).to_have_count(3)
    widths = [each.bounding_box() for each in memory.locator(".stack span").all()]
    sizes = [story["memory"][name] for name in ("weights_bytes", "kv_bytes", "arena_bytes")]
    assert widths[1] and widths[1]["width"] > 3 and sizes[1] == max(sizes)
    kernels = page.locator(".card", has=page.get_by_role("heading", name="Kernels"))
    assert kernels.locator("tbody tr").count() == len(story["kernels"])


def test_a_row_of_the_certificate_is_drawn_as_its_distance_to_the_budget(
    server: Server, open_page: Callable[..., Watched]
) -> None:
    def row(name: str, found: float | None, ok: bool = True, **more: object) -> dict[str, Any]:
        use = {"measure": "relative_error", "found": found, "limit": 1e-5, "by": "float32"}
        return {"name": name, "ran_by": "reference", "dtype": "float32", "ok": ok, "reason": "", "use": use, **more}

    own = {"measure": "kl", "found": 1.2e-4, "limit": 1.3e-4, "by": "hugging_face"}
    rows = [
        row("program", 1.2e-7),
        row("program_random", 1e-5),
        row("captured_far", 1e-4, ok=False),
        row("program_small", None, ok=False, reason="its logits are not all finite numbers"),
        row("hugging_face", None, dtype="bfloat16", use=None),
        row("kernels", None, dtype="bfloat16", use=own),
    ]
    budgets = {"float32_relative_error": 1e-5, "kl_factor": 1.1}
    certificate = {"kind": "auto", "ok": False, "scope": "a model", "budgets": budgets, "rows": rows}
    report = {**request(server.url, "/artifact").json, "certificate": certificate, "unreadable": []}
    page = open_page(server.url).page
    page.route("**/artifact?*", lambda route: route.fulfill(json=report))
    page.click("[data-tab=artifact]")
    found = page.locator(".card", has=page.get_by_role("heading", name="Certificate"))
    expect(found.locator(".badge")).to_have_text("over a budget")
    expect(found.locator(".about").first).to_contain_text("Logits in float32 may be off by 1e-5 of their size.")
    texts = [each.text_content() or "" for each in found.locator("tbody tr").all()]
    assert "1.2e-7 of 1e-5" in texts[0] and "kept" in texts[0]
    assert "1e-4 of 1e-5" in texts[2] and "over its budget" in texts[2]
    assert "no number of 1e-5" in texts[3] and "finite" in texts[3]
    assert "It has none" in texts[4]
    assert "1.2e-4 of 1.3e-4" in texts[5] and "kept" in texts[5]

    def width(locator: Any) -> float:
        return float(locator.bounding_box()["width"])

    bars = found.locator(".budget")
    marks = [each.bounding_box() for each in bars.locator(".mark").all()]
    assert len(marks) == 5 and len({box["x"] for box in marks if box}) == 1, "the budget is at one place"
    shares = [width(each.locator(".fill")) / width(each) for each in bars.all()]
    assert shares[0] < shares[4] < 0.75 == pytest.approx(shares[1]) and 0.75 < shares[2] < shares[3] == 1
    assert [each.locator(".over").count() for each in bars.all()] == [0, 0, 1, 1, 0]


def test_the_story_is_of_the_engine_that_runs(shipped: Server) -> None:
    story = request(shipped.url, "/artifact").json
    assert [row["name"] for row in story["passes"]][:2] == ["captured", "canonicalise"]
    first, last = story["passes"][0], story["passes"][-1]
    assert last["nodes_after"] < first["nodes_after"] and last["prefill"]["bytes"] < first["prefill"]["bytes"]
    assert story["memory"]["kv_tokens"] * story["memory"]["kv_bytes_per_token"] == story["memory"]["kv_bytes"]
    arena = re.search(r"arena ([\d.]+) MB", shipped.log)
    assert arena and story["memory"]["arena_bytes"] / 1e6 == pytest.approx(float(arena[1]), abs=0.06)
    text = json.dumps(story)
    assert str(ROOT) not in text and "/tmp" not in text
    for graph in (first["graph"], last["graph"]):
        assert b"= input\n" in request(shipped.url, f"/artifact/graphs/{graph}").body
    for name in ("99_none", "weights", "..%2Fengine"):
        assert request(shipped.url, f"/artifact/graphs/{name}").status in (400, 404)
    assert request(shipped.url, "/artifact?model=other").status == 404


def test_changes_of_a_text_are_found(server: Server, open_page: Callable[..., Watched]) -> None:
    page = open_page(server.url).page
    cases = [
        ("a\nb\nc", "a\nb\nc"),
        ("", "x"),
        ("a\nb\nc\nd", "b\nx\nd\ne"),
        ("%0 = f(%1)\n%2 = g(%0)\n%3 = h(%2)", "%0 = f(%1)\n%1 = h(%0)"),
        ("\n".join("abcabba"), "\n".join("cbabac")),
    ]
    for before, after in cases:
        lines = page.evaluate(
            "async ([before, after]) => (await import('/web/text_diff.js')).diff(before, after)", [before, after]
        )
        old, new = (re.sub(r"%\d+", "%", text).split("\n") for text in (before, after))
        found = [(line["sign"], re.sub(r"%\d+", "%", line["text"])) for line in lines]
        assert [text for sign, text in found if sign != "+"] == old
        assert [text for sign, text in found if sign != "-"] == new
        assert sum(sign == " " for sign, _ in found) >= sum(
            block.size for block in difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
        )
    assert page.evaluate("async () => (await import('/web/text_diff.js')).diff('a\\nb\\nc', 'x\\ny\\nz', 3)") is None


def test_a_stream_may_be_cut_anywhere(server: Server, open_page: Callable[..., Watched]) -> None:
    events = [{"text": "héllo ✓"}, {"text": "\n\ndata: no\n\n"}, {"text": ""}]
    data = b"".join(b"data: " + json.dumps(each, ensure_ascii=False).encode() + b"\n\n" for each in events)
    data += b"data: [DONE]\n\n"
    script = """async ([bytes, size]) => {
        const { events } = await import("/web/api.js");
        let at = 0;
        const reader = { read: async () => {
            if (at >= bytes.length) return { done: true };
            const value = new Uint8Array(bytes.slice(at, at += size));
            return { value, done: false };
        } };
        const found = [];
        try {
            for await (const event of events(reader)) found.push(event);
        } catch (error) {
            found.push(error.message);
        }
        return found;
    }"""
    page = open_page(server.url).page
    for size in (1, 2, 7, 1000):
        assert page.evaluate(script, [list(data), size]) == events
    cut = page.evaluate(script, [list(data[:-20]), 5])
    assert cut[:2] == events[:2] and "broke" in cut[-1]
    failed = b'data: {"error": {"message": "the engine died", "code": 503}}\n\n'
    assert page.evaluate(script, [list(failed), 9]) == ["the engine died"]


# ---------------------------------------------------------------------------------------------- how it looks


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", list(SIZES))
def test_it_is_accessible_and_fits(scheme: str, size: str, shipped: Server, open_page: Callable[..., Watched]) -> None:
    """Screenshots are left in pytest's temporary folder; axe checks names, roles and contrasts."""
    page = open_page(shipped.url, color_scheme=scheme, viewport=SIZES[size]).page
    chat(page, PROMPT, temperature=0, max_tokens=40)
    answered(page)
    page.check("#parameter-colours")
    for tab, ready in (("playground", ".message"), ("dashboard", "#tiles .tile"), ("artifact", ".stack")):
        page.click(f"[data-tab={tab}]")
        page.wait_for_selector(f"#{tab} {ready}")
        if tab == "artifact":
            page.get_by_role("button", name="fuse_silu_mul", exact=True).click()
            page.wait_for_selector(".program .added")
        found = Axe().run(page)
        problems = [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found.response["violations"]]
        assert not problems
        assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
    ground = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", ground))) < 60) == (scheme == "dark")
    page.click("#theme-button")  # light, whatever the system says
    assert (
        min(map(int, re.findall(r"\d+", page.evaluate("() => getComputedStyle(document.body).backgroundColor")))) > 200
    )
