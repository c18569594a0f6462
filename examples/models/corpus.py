"""The training corpus of the shipped models, from the text of this Python's standard library, and its tokenizer."""

import ast
import inspect
import random
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

HELD_OUT = (
    "calendar.py", "cmd.py", "fnmatch.py", "graphlib.py", "heapq.py", "json/decoder.py", "sched.py", "shlex.py",
)  # fmt: skip
# Tests are missing from some installations; the other names hold tables rather than text.
SKIPPED_PARTS = {
    "site-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "lib-dynload", "__phello__",
}  # fmt: skip
SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "stringprep", "entities", "_bootsubprocess")

VOCAB_SIZE = 4096
BOS, EOS, PAD, END = "<|bos|>", "<|eos|>", "<|pad|>", "<|end|>"
SPECIAL_TOKENS = [BOS, EOS, PAD, "<|system|>", "<|user|>", "<|assistant|>", END]
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] | trim + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""
# The pre-tokenizer split of Llama 3: words keep their leading space, digits come in threes, newlines end a piece.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SYSTEM_PROMPT = "You answer questions about the Python standard library."


@dataclass(frozen=True)
class Corpus:
    documents: list[str]
    conversations: list[list[dict[str, str]]]
    held_out: str
    num_files: int


def stdlib_files() -> Iterator[tuple[str, Path]]:
    """Yield the relative name and the path of every source file used, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    for name, path in sorted(files.items()):
        parts = name.split("/")
        if not SKIPPED_PARTS.intersection(parts) and not any(part.startswith(SKIPPED_PREFIXES) for part in parts):
            yield name, path


def read_corpus(seed: int) -> Corpus:
    documents: list[str] = []
    conversations: list[list[dict[str, str]]] = []
    held_out: list[str] = []
    rng = random.Random(seed)
    num_files = 0
    for name, path in stdlib_files():
        with tokenize.open(path) as file:
            text = file.read()
        if len(text) < 200:
            continue
        num_files += 1
        if name in HELD_OUT:
            held_out.append(text)
        elif name == "pydoc_data/topics.py":
            documents.extend(topics(text))
        else:
            documents.append(text)
            module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            conversations.extend(conversations_about(module, text, rng))
    return Corpus(documents, conversations, "\n\n".join(held_out), num_files)


def topics(source: str) -> list[str]:
    """Return the sections of the language reference: the values of the dictionary in pydoc_data/topics.py."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return [text for text in ast.literal_eval(node.value).values() if len(text) > 200]
    return []


def conversations_about(module: str, source: str, rng: random.Random) -> Iterator[list[dict[str, str]]]:
    """Yield one short conversation for each public, documented module, class and function."""
    tree = ast.parse(source)
    summary = first_paragraph(tree)
    if summary:
        yield conversation([(f"What is the `{module}` module for?", summary)], rng)
    stack: list[tuple[str, ast.AST]] = [(module, tree)]
    while stack:
        prefix, parent = stack.pop(0)
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
                continue
            name = f"{prefix}.{node.name}"
            if isinstance(node, ast.ClassDef):
                stack.append((name, node))
            summary = first_paragraph(node)
            if not summary:
                continue
            question = rng.choice((f"What does `{name}` do?", f"Explain `{name}`.", f"What is `{name}` for?"))
            turns = [(question, summary)]
            if isinstance(node, ast.FunctionDef):
                code = textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")
                if rng.random() < 0.4:
                    call = f"{name}({ast.unparse(node.args)})"
                    turns.append(("How do I call it?", f"```python\n{call}\n```"))
                if code and len(code) < 1200 and rng.random() < 0.3:
                    turns.append(("Show me its code.", f"```python\n{code}\n```"))
            yield conversation(turns, rng)


def first_paragraph(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    """Return the first paragraph of a docstring on one line; empty if missing or of no use as an answer."""
    docstring = inspect.cleandoc(ast.get_docstring(node) or "")
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return paragraph if 20 <= len(paragraph) <= 600 else ""


def conversation(turns: list[tuple[str, str]], rng: random.Random) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": SYSTEM_PROMPT}] if rng.random() < 0.3 else []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    bos_id = SPECIAL_TOKENS.index(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos_id)]
    )
    wrapped: PreTrainedTokenizerFast = cast(Any, PreTrainedTokenizerFast)(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=SPECIAL_TOKENS[3:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    return wrapped


def encode_corpus(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> tuple[list[np.ndarray], float]:
    """Return one array of ids per document or conversation, and the share of tokens in conversations."""
    backend = tokenizer.backend_tokenizer
    bos, eos = cast(int, tokenizer.bos_token_id), cast(int, tokenizer.eos_token_id)
    texts = [[bos, *e.ids, eos] for e in backend.encode_batch(corpus.documents, add_special_tokens=False)]
    chats = cast(list[str], [tokenizer.apply_chat_template(c, tokenize=False) for c in corpus.conversations])
    chat_ids = [e.ids for e in backend.encode_batch(chats, add_special_tokens=False)]
    num_text, num_chat = sum(map(len, texts)), sum(map(len, chat_ids))
    return [np.array(ids, dtype=np.int64) for ids in texts + chat_ids], num_chat / (num_text + num_chat)
