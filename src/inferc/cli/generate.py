"""The `inferc generate` and `inferc chat` commands, which run an artifact in this process."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inferc.cli.common import (
    Deterministic,
    Isa,
    Json,
    KVDisk,
    KVDiskSize,
    KVEvict,
    KVMemory,
    MaxBatchedTokens,
    MaxSeqs,
    OneAdapter,
    OutOrModel,
    Policy,
    PrefixCache,
    ReasoningFormat,
    Record,
    SpecialTokensInText,
    Speculate,
    SpeculateBranches,
    SpeculateTokens,
    StructuredOutputsBackend,
    Tap,
    TbtMs,
    Threads,
    TrustedKeys,
    decode_utf8,
    engine_options,
    form_options,
    listed,
    name_of,
    print_json,
    say,
)
from inferc.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from inferc.runtime.engine.llm import LLM
    from inferc.runtime.engine.prompts import Prompt
    from inferc.runtime.step.sampling_params import SamplingParams
    from inferc.runtime.step.structured_outputs import StructuredOutputs

MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        metavar="N",
        help="Largest number of new tokens; by default the model's own limit, or 128 (chat: 512) if it has none.",
    ),
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", metavar="T", help="Sampling temperature; 0 is greedy.")
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        metavar="P",
        help="Nucleus sampling: sample from the most likely tokens with total probability P; 1 is off.",
    ),
]
TopK = Annotated[
    int | None, typer.Option("--top-k", metavar="K", help="Sample only from the K most likely tokens; 0 is off.")
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p",
        metavar="P",
        help="Sample only from tokens that are at least P times as likely as the likeliest; 0 is off.",
    ),
]
TypicalP = Annotated[
    float | None,
    typer.Option(
        "--typical-p",
        metavar="P",
        help="Sample from the tokens closest to the expected surprise, with total probability P; 1 is off.",
    ),
]
XtcProbability = Annotated[
    float | None,
    typer.Option(
        "--xtc-probability",
        metavar="P",
        help="Exclude top choices (XTC) with this probability, token by token; 0 is off.",
    ),
]
XtcThreshold = Annotated[
    float | None,
    typer.Option(
        "--xtc-threshold",
        metavar="P",
        help="Probability from which tokens are excluded, all but the least likely of them; 0.1 by default.",
    ),
]
DryMultiplier = Annotated[
    float | None,
    typer.Option(
        "--dry-multiplier",
        metavar="X",
        help="Make tokens that go on with a repetition less likely (DRY); 0.8 is usual, 0 is off.",
    ),
]
DryBase = Annotated[
    float | None,
    typer.Option("--dry-base", metavar="X", help="How fast that grows with the repetition's length; 1.75 by default."),
]
DryAllowedLength = Annotated[
    int | None,
    typer.Option("--dry-allowed-length", metavar="N", help="Tokens that may be repeated for free; 2 by default."),
]
DryPenaltyLastN = Annotated[
    int | None,
    typer.Option(
        "--dry-penalty-last-n", metavar="N", help="Look for repetitions in the last N tokens; -1, the default, in all."
    ),
]
DryBreakers = Annotated[
    list[str] | None,
    typer.Option(
        "--dry-sequence-breaker",
        metavar="TEXT|none",
        help="Text that no repetition reaches over; may be repeated; none: no text. By default line breaks, colons,"
        " double quotes and asterisks.",
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        metavar="X",
        help="Make tokens that came before less likely (above 1) or more (below 1); 1 is off.",
    ),
]
Seed = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="Seed of the random numbers, which makes sampling repeatable.")
]

Schema = Annotated[
    str | None,
    typer.Option(
        "--schema",
        metavar="FILE|JSON",
        help='JSON Schema that the answer follows: a file, or the schema itself, as \'{"type": "object", …}\'.',
    ),
]
Regex = Annotated[
    str | None, typer.Option("--regex", metavar="PATTERN", help="Regular expression that the whole answer matches.")
]
Choice = Annotated[
    list[str] | None,
    typer.Option("--choice", metavar="TEXT", help="Answer with one of these texts; repeated for each of them."),
]
Grammar = Annotated[
    Path | None,
    typer.Option("--grammar", metavar="FILE", help="Grammar of the answer, as GBNF (llama.cpp's form) or Lark's."),
]


def generate(
    out: OutOrModel,
    prompt: Annotated[
        list[str],
        typer.Option(
            "--prompt",
            metavar="TEXT|-",
            help="Prompt to continue; may be repeated; - reads it from standard input, in UTF-8.",
        ),
    ],
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    typical_p: TypicalP = None,
    xtc_probability: XtcProbability = None,
    xtc_threshold: XtcThreshold = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="Stop generating when this text appears; may be repeated."),
    ] = None,
    bad_words: Annotated[
        list[str] | None,
        typer.Option("--bad-words", metavar="TEXT", help="Never write this text; may be repeated."),
    ] = None,
    no_repeat_ngram_size: Annotated[
        int | None,
        typer.Option(
            "--no-repeat-ngram-size",
            metavar="N",
            help="Never write N tokens in an order in which they came before, in the prompt or the answer; 0 is off.",
        ),
    ] = None,
    dry_multiplier: DryMultiplier = None,
    dry_base: DryBase = None,
    dry_allowed_length: DryAllowedLength = None,
    dry_penalty_last_n: DryPenaltyLastN = None,
    dry_sequence_breakers: DryBreakers = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue after the model's end-of-sequence token.")
    ] = False,
    schema: Schema = None,
    regex: Regex = None,
    choice: Choice = None,
    grammar: Grammar = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it is generated.")] = False,
    threads: Threads = None,
    isa: Isa = "auto",
    max_num_seqs: MaxSeqs = 64,
    max_num_batched_tokens: MaxBatchedTokens = None,
    kv_memory: KVMemory = "auto",
    deterministic: Deterministic = False,
    prefix_cache: PrefixCache = True,
    policy: Policy = "fcfs",
    tbt_ms: TbtMs = None,
    kv_disk: KVDisk = None,
    kv_disk_size: KVDiskSize = "auto",
    kv_evict: KVEvict = None,
    record: Record = None,
    tap: Tap = None,
    tap_out: Annotated[
        Path | None,
        typer.Option("--tap-out", metavar="FILE.npz", help="File for the values of --tap (numpy.load reads it)."),
    ] = None,
    special_tokens_in_text: SpecialTokensInText = "allow",
    speculate: Speculate = "none",
    speculate_tokens: SpeculateTokens = 15,
    speculate_branches: SpeculateBranches = 1,
    adapter: OneAdapter = None,
    structured_outputs_backend: StructuredOutputsBackend = "auto",
    trusted_keys: TrustedKeys = None,
    as_json: Json = False,
) -> None:
    """Continue one or more prompts; sampling options that are not given take the model's generation defaults."""
    if stream and as_json:
        raise ConfigError("--stream and --json exclude each other: JSON comes whole; leave one out")
    if stream and len(prompt) > 1:
        raise ConfigError(f"--stream takes one --prompt, found {len(prompt)}; leave --stream out")
    if prompt.count("-") > 1:
        raise ConfigError(f"--prompt - was given {prompt.count('-')} times: standard input is one prompt; give it once")
    check_tap(tap, tap_out)
    form = form_of(schema, regex, choice, grammar)
    dry = dry_of(dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers)
    xtc = xtc_of(xtc_probability, xtc_threshold)
    from inferc.runtime.engine.llm import LLM

    asked: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    asked.update(min_p=min_p, typical_p=typical_p, repetition_penalty=repetition_penalty, **xtc, **dry)
    asked.update(bad_words=bad_words or None, no_repeat_ngram_size=no_repeat_ngram_size)
    asked.update(stop=tuple(stop) if stop else None, ignore_eos=ignore_eos, tap=bool(tap), structured_outputs=form)
    asked.update(adapter=name_of(adapter))
    texts = [decode_utf8(sys.stdin.buffer.read(), "standard input") if text == "-" else text for text in prompt]
    with LLM(
        out,
        special_tokens_in_text=special_tokens_in_text,
        **engine_options(
            threads,
            isa,
            max_num_seqs,
            max_num_batched_tokens,
            kv_memory,
            deterministic=deterministic,
            prefix_cache=prefix_cache,
            policy=policy,
            tbt_ms=tbt_ms,
            kv_disk=kv_disk,
            kv_disk_size=kv_disk_size,
            kv_evict=kv_evict,
            record=record,
            tap=tap,
            trusted_keys=trusted_keys,
            speculate=speculate,
            speculate_tokens=speculate_tokens,
            speculate_branches=speculate_branches,
            adapters=listed(adapter),
            structured_outputs_backend=structured_outputs_backend,
        ),
    ) as llm:
        params = llm.sampling_params(**asked, max_tokens=_limit(llm, max_tokens, 128))
        if stream:
            for piece in _pieces(llm, texts[0], params):
                say(piece, end="", flush=True)
            say()
            _keep_tapped(llm, tap_out)
            return
        answers = llm.generate(texts, params, use_tqdm=sys.stderr.isatty())
        tapped = _keep_tapped(llm, tap_out)
    if as_json:
        rows = [(answer.prompt, output) for answer in answers for output in answer.outputs]
        keys = ["text", "token_ids", "finish_reason", *(["num_forgotten_tokens"] if kv_evict is not None else [])]
        outputs = [{"prompt": p, **{key: getattr(o, key) for key in keys}} for p, o in rows]
        print_json({"outputs": outputs, **({"tapped": tapped} if tapped else {})})
        return
    for answer in answers:
        say(answer.outputs[0].text)


def _limit(llm: LLM, given: int | None, otherwise: int) -> int:
    """Return the largest number of new tokens: the given one, the model's default, or else the command's default."""
    return given if given is not None else int(llm.defaults.get("max_tokens", otherwise))


def xtc_of(probability: float | None, threshold: float | None) -> dict[str, Any]:
    """Return the parameters of XTC. Raises ConfigError for a threshold that nothing reads."""
    if threshold is not None and not probability:
        raise ConfigError(
            f"--xtc-threshold {threshold}: nothing is excluded without --xtc-probability; give --xtc-probability 0.5,"
            " or leave it out"
        )
    return {"xtc_probability": probability, "xtc_threshold": threshold}


def dry_of(
    multiplier: float | None,
    base: float | None,
    allowed_length: int | None,
    last_n: int | None,
    breakers: list[str] | None,
) -> dict[str, Any]:
    """Return the parameters of DRY. Raises ConfigError for options that nothing reads, and for `none` beside texts."""
    options = {
        "--dry-base": base,
        "--dry-allowed-length": allowed_length,
        "--dry-penalty-last-n": last_n,
        "--dry-sequence-breaker": breakers or None,
    }
    if not multiplier and (idle := [name for name, value in options.items() if value is not None]):
        raise ConfigError(
            f"{' and '.join(idle)} say how DRY works, which is off; give --dry-multiplier 0.8, or leave"
            f" {'them' if len(idle) > 1 else 'it'} out"
        )
    if breakers and "none" in breakers and len(breakers) > 1:
        raise ConfigError("--dry-sequence-breaker none leaves no text, and others are given; leave one of them out")
    found: dict[str, Any] = {"dry_multiplier": multiplier, "dry_base": base, "dry_allowed_length": allowed_length}
    if breakers:
        found["dry_sequence_breakers"] = () if breakers == ["none"] else tuple(breakers)
    return {**found, "dry_penalty_last_n": last_n}


def form_of(
    schema: str | None, regex: str | None, choice: list[str] | None, grammar: Path | None
) -> StructuredOutputs | None:
    """Return the form that the options ask of an answer, or None. Raises ConfigError for more than one of them."""
    options = {"--schema": schema, "--regex": regex, "--choice": choice, "--grammar": grammar}
    given = [name for name, value in options.items() if value]
    if not given:
        return None
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} each give the answer a form; give one of them")
    from inferc.runtime.step.structured_outputs import StructuredOutputs

    (name,) = given
    if schema:
        text = schema if schema.lstrip().startswith("{") else _text_of(name, Path(schema))
        return StructuredOutputs(json=text, label=name)
    if grammar:
        return StructuredOutputs(grammar=_text_of(name, grammar), label=name)
    return StructuredOutputs(regex=regex, choice=tuple(choice or ()) or None, label=name)


def _text_of(option: str, path: Path) -> str:
    try:
        return decode_utf8(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be read: {error.strerror}") from None


def check_tap(tap: list[str] | None, tap_out: Path | None) -> None:
    if bool(tap) != (tap_out is not None):
        raise ConfigError("--tap NAME says which values are kept and --tap-out FILE.npz where; give both or none")
    if tap_out is not None and tap_out.suffix != ".npz":
        raise ConfigError(f"--tap-out {tap_out}: expected a name that ends in .npz")


def _keep_tapped(llm: LLM, path: Path | None) -> dict[str, Any]:
    """Write the tapped values of all prompts and return a description of them; empty if nothing is tapped."""
    if path is None:
        return {}
    from inferc.runtime.record.tapped import write_tapped

    sequences = llm.tapped()
    write_tapped(path, sequences)
    rows = sum(len(each.token_ids) for each in sequences)
    first = sequences[0].values
    print(f"{path}: {len(first)} values of {rows} tokens, {path.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
    for name, value in first.items():
        print(f"  {name:40} {value.dtype}[{', '.join(map(str, ('rows', *value.shape[1:])))}]", file=sys.stderr)
    return {"file": str(path), "rows": rows, "values": {name: list(value.shape[1:]) for name, value in first.items()}}


def chat(
    out: OutOrModel,
    system: Annotated[
        str, typer.Option("--system", metavar="TEXT", help="System message: instructions for the model.")
    ] = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    typical_p: TypicalP = None,
    xtc_probability: XtcProbability = None,
    xtc_threshold: XtcThreshold = None,
    repetition_penalty: RepetitionPenalty = None,
    dry_multiplier: DryMultiplier = None,
    dry_base: DryBase = None,
    dry_allowed_length: DryAllowedLength = None,
    dry_penalty_last_n: DryPenaltyLastN = None,
    dry_sequence_breakers: DryBreakers = None,
    seed: Seed = None,
    threads: Threads = None,
    isa: Isa = "auto",
    kv_memory: KVMemory = "auto",
    deterministic: Deterministic = False,
    special_tokens_in_text: SpecialTokensInText = "allow",
    reasoning_format: ReasoningFormat = None,
    speculate: Speculate = "none",
    speculate_tokens: SpeculateTokens = 15,
    speculate_branches: SpeculateBranches = 1,
    adapter: OneAdapter = None,
    trusted_keys: TrustedKeys = None,
    as_json: Json = False,
) -> None:
    """Chat with the model; /clear forgets the conversation, /exit or end of input ends it.

    Ctrl-C stops an answer that is being generated; otherwise it ends the chat. A message that the model cannot take,
    for example because the conversation has become too long, is left out of the conversation. Reasoning is dimmed.

    With --json, each line of standard input is a message, and the conversation is printed at the end, however it ends.
    """
    dry = dry_of(dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers)
    xtc = xtc_of(xtc_probability, xtc_threshold)
    from inferc.runtime.engine.llm import LLM

    asked: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    asked.update(min_p=min_p, typical_p=typical_p, repetition_penalty=repetition_penalty, **xtc, **dry)
    start = [{"role": "system", "content": system}] if system else []
    options = engine_options(threads, isa, 1, 512, kv_memory, deterministic=deterministic, trusted_keys=trusted_keys)
    options |= {"speculate": speculate, "speculate_tokens": speculate_tokens, "adapters": listed(adapter)}
    options |= form_options(None, reasoning_format)
    options["speculate_branches"] = speculate_branches
    asked |= {"adapter": name_of(adapter)}
    with LLM(out, special_tokens_in_text=special_tokens_in_text, **options) as llm:
        if not llm.text.has_chat_template:
            raise ConfigError(f"{out} has no chat template: its model does not chat; use `inferc generate`")
        params = llm.sampling_params(**asked, max_tokens=_limit(llm, max_tokens, 512))
        messages = list(start)
        try:
            for line in _lines(as_json):
                if line == "/exit":
                    break
                if line == "/clear":
                    messages = list(start)
                    continue
                messages.append({"role": "user", "content": line})
                try:
                    answer = _answer(llm, messages, params, is_shown=not as_json)
                except RequestError as error:
                    messages.pop()
                    print(f"inferc: {error}; /clear forgets the conversation", file=sys.stderr)
                else:
                    messages.append(answer)
        finally:
            if as_json:
                print_json({"messages": messages})


def _lines(as_json: bool) -> Iterator[str]:
    """Yield the lines that the user types or pipes in, without empty ones, until the end of input."""
    is_typed = sys.stdin.isatty()
    # Line editing writes the "> " prompt to standard output, so it needs a terminal there and must not mix with JSON.
    is_edited = is_typed and sys.stdout.isatty() and not as_json
    if is_typed:
        print("/clear forgets the conversation, /exit ends it", file=sys.stderr)
    if is_edited:
        import readline  # noqa: F401  (gives input() its line editing)

        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # the tokenizer reports it
    for number in itertools.count(1):
        if is_edited:
            try:
                line = input("> ")
            except EOFError:
                return
        else:
            if is_typed:
                print("> ", end="", file=sys.stderr, flush=True)
            data = sys.stdin.buffer.readline()
            if not data:
                return
            line = decode_utf8(data, f"line {number} of standard input")
        if line := line.strip():
            yield line


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams, is_shown: bool) -> dict[str, str]:
    """Generate and return the answer to a conversation, and print it as it comes if it is shown; Ctrl-C stops it.

    Its reasoning is dimmed on a terminal, and an empty line stands behind it.
    """
    from inferc.runtime.engine.chat_parts import parts_of

    begin, end = ("\x1b[2m", "\x1b[22m") if sys.stdout.isatty() else ("", "")
    thought = said = ""
    try:
        for idea, piece in parts_of(llm, messages, params):
            before = begin if idea and not thought else ""
            thought += idea
            between = f"{end}\n\n" if piece and thought and not said else ""
            said += piece
            if is_shown:
                say(before + idea + between + piece, end="", flush=True)
    except KeyboardInterrupt:
        pass  # the partial answer stays in the conversation
    if is_shown:
        say("" if said or not thought else end)
    return {"role": "assistant", "content": said, **({"reasoning_content": thought} if thought else {})}


def _pieces(llm: LLM, prompt: Prompt, params: SamplingParams) -> Iterator[str]:
    """Yield the text of an answer piece by piece as it is generated; closing the iterator ends the answer."""
    for answer in llm.stream(prompt, params):
        yield answer.outputs[0].new_text
