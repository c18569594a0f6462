"""The sentencepiece model of a checkpoint: the library's own encoding, and its conversion to a tokenizer.json.

transformers converts pieces and merges, but derives the treatment of spaces from the class that a config names: with
the usual classes the first of several leading spaces is lost. The sentencepiece model itself says how a text is
normalized, and tokenizer.json can express all of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers

FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
UNIGRAM = 1  # the value of model_type in the model's trainer_spec
SPACE = "▁"


def open_model(folder: Path) -> tuple[str, Any] | None:
    """Return the name of the folder's sentencepiece model and the library's processor of it.

    The result is None without a model, without the library, or for a file of another kind.
    """
    name = next((each for each in FILES if (folder / each).is_file()), None)
    if name is None:
        return None
    try:
        import sentencepiece
    except ImportError:  # then transformers has converted a file of another kind
        return None
    try:
        return name, sentencepiece.SentencePieceProcessor(model_file=str(folder / name))
    except RuntimeError:  # tiktoken's files may have the same name
        return None


def encode(processor: Any, tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids that the sentencepiece library gives, as `tokenizer` numbers its pieces.

    The two numberings agree except for classes that renumber the pieces, such as that of XGLM, whose model was trained
    on other ids than the file's.
    """
    ids = [int(token) for token in processor.encode(text)]
    names = [processor.id_to_piece(token) for token in ids]
    if all(tokenizer.token_to_id(name) == token for token, name in zip(ids, names, strict=True)):
        return ids
    found = [tokenizer.token_to_id(name) for name in names]
    return ids if None in found else [int(token) for token in found if token is not None]


def decode(processor: Any, tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return the text that the sentencepiece library decodes from the ids' pieces, without special tokens."""
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return str(processor.decode([tokenizer.id_to_token(token_id) for token_id in ids if token_id not in special]))


def convert(theirs: Tokenizer, processor: Any) -> Tokenizer:
    """Return a tokenizer with the sentencepiece model's own treatment of spaces and characters.

    theirs: transformers' conversion, whose pieces and added tokens are kept.
    """
    from transformers.convert_slow_tokenizer import import_protobuf

    proto = import_protobuf().ModelProto()
    proto.ParseFromString(processor.serialized_model_proto())
    found = _unigram(theirs, proto) if proto.trainer_spec.model_type == UNIGRAM else Tokenizer.from_str(theirs.to_str())
    spec = proto.normalizer_spec
    steps: list[Any] = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    found.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    found.pre_tokenizer = None
    strip = [decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else []
    found.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return found


def _unigram(theirs: Tokenizer, proto: Any) -> Tokenizer:
    """Return a unigram model with its scores, which some classes of transformers turn into merges."""
    if isinstance(theirs.model, models.Unigram):
        return Tokenizer.from_str(theirs.to_str())
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    found = Tokenizer(models.Unigram(pieces, proto.trainer_spec.unk_id, byte_fallback=proto.trainer_spec.byte_fallback))
    for _, token in sorted(theirs.get_added_tokens_decoder().items()):
        found.add_tokens([token])
    found.post_processor = theirs.post_processor
    return found
