"""Reads a sentencepiece `tokenizer.model` and builds the equal `tokenizers.Tokenizer`.

The file is one protobuf message, ModelProto of sentencepiece's src/sentencepiece_model.proto. The
few fields that matter are read here: the module that the sentencepiece package generates for it
demands one particular version of the protobuf runtime, and the gRPC stubs demand another.

As in transformers, one space before the text is not told apart from the one that a model adds.
"""

import dataclasses
import enum
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers import decoders as token_decoders

from loraplex.core.errors import ConfigError, UnsupportedModelError

_SPACE = "\u2581"


class PieceType(enum.IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_UNIGRAM, _BPE = 1, 2


@dataclasses.dataclass(frozen=True)
class Piece:
    text: str
    score: float = 0.0
    type: PieceType = PieceType.NORMAL


@dataclasses.dataclass(frozen=True)
class SentencePieceModel:
    """What a tokenizer.model says; the defaults are the format's."""

    pieces: tuple[Piece, ...]
    model_type: int = _UNIGRAM
    byte_fallback: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    charsmap: bytes = b""
    """Rules of its text normalization, compiled; empty: the text stays as it is."""
    adds_dummy_prefix: bool = True
    removes_extra_spaces: bool = True

    def text_of(self, token_id: int) -> str | None:
        """None if there is no such piece: a model without BOS has some id that is out of range."""
        return self.pieces[token_id].text if 0 <= token_id < len(self.pieces) else None


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Raises ConfigError if the file is not a sentencepiece model."""
    try:
        model = _parse_model(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except (ValueError, IndexError, struct.error) as error:
        raise ConfigError(
            f"{path} is not a sentencepiece model ({error}); a tiktoken file has to be converted "
            "to a tokenizer.json first"
        ) from error
    if model.model_type not in (_UNIGRAM, _BPE):
        raise UnsupportedModelError(
            f"{path} is a word or character model; served are BPE and Unigram"
        )
    return model


def build_tokenizer(model: SentencePieceModel, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer, with the model's own special tokens but without those that the folder adds.

    Of `config` (tokenizer_config.json) add_prefix_space and legacy count: with legacy, the space
    that is put before a text is put after each special token, too. Without it, that is so for
    models that normalize text, and not for Llama's.
    """
    tokenizer = Tokenizer(_bpe(model) if model.model_type == _BPE else _unigram(model))
    add_prefix_space = config.get("add_prefix_space")
    adds_prefix = model.adds_dummy_prefix if add_prefix_space is None else bool(add_prefix_space)
    rules = _normalizers(model)
    is_legacy = config.get("legacy", bool(rules))
    scheme = ("always" if is_legacy else "first") if adds_prefix else "never"
    if rules:
        tokenizer.normalizer = normalizers.Sequence(rules)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    tokenizer.decoder = _decoder(adds_prefix)
    for piece in model.pieces:
        if piece.type in (PieceType.UNKNOWN, PieceType.CONTROL):
            tokenizer.add_tokens([AddedToken(piece.text, normalized=False, special=True)])
        elif piece.type is PieceType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(piece.text, normalized=False, special=False)])
    return tokenizer


def _bpe(model: SentencePieceModel) -> models.BPE:
    vocabulary = {piece.text: token_id for token_id, piece in enumerate(model.pieces)}
    return models.BPE(
        vocab=vocabulary,
        merges=_merges(model, vocabulary),
        unk_token=model.text_of(model.unk_id),
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _merges(model: SentencePieceModel, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score first."""
    ranked = []
    for token_id, piece in enumerate(model.pieces):
        if piece.type is not PieceType.NORMAL:
            continue
        for cut in range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-piece.score, token_id, cut, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _unigram(model: SentencePieceModel) -> models.Unigram:
    return models.Unigram(
        vocab=[(piece.text, piece.score) for piece in model.pieces],
        unk_id=model.unk_id,
        byte_fallback=model.byte_fallback,
    )


def _normalizers(model: SentencePieceModel) -> list[normalizers.Normalizer]:
    rules: list[normalizers.Normalizer] = []
    if model.charsmap:
        rules.append(normalizers.Precompiled(model.charsmap))
    if model.removes_extra_spaces:
        rules.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        rules.append(normalizers.Replace(Regex(" {2,}"), " "))
    return rules


def _decoder(adds_prefix: bool) -> token_decoders.Decoder:
    steps: list[token_decoders.Decoder] = [
        token_decoders.Replace(_SPACE, " "),
        token_decoders.ByteFallback(),
        token_decoders.Fuse(),
    ]
    if adds_prefix:
        steps.append(token_decoders.Strip(content=" ", left=1, right=0))
    return token_decoders.Sequence(steps)


# ------------------------------------------------------------------ the protobuf wire format

_Field = tuple[int, int | bytes]
"""(field number, value): an int, or the bytes of a string, a message or a fixed-width number."""


def _parse_model(data: bytes) -> SentencePieceModel:
    pieces = []
    settings: dict[str, Any] = {}
    for number, value in _fields(data):
        match number, value:
            case 1, bytes(message):
                pieces.append(_parse_piece(message))
            case 2, bytes(message):
                settings |= _pick(message, _TRAINER_FIELDS)
            case 3, bytes(message):
                settings |= _pick(message, _NORMALIZER_FIELDS)
    if not pieces:
        raise ValueError("it has no pieces")
    return SentencePieceModel(tuple(pieces), **settings)


_TRAINER_FIELDS = {
    3: ("model_type", int),
    35: ("byte_fallback", bool),
    40: ("unk_id", int),
    41: ("bos_id", int),
    42: ("eos_id", int),
}
_NORMALIZER_FIELDS = {
    2: ("charsmap", bytes),
    3: ("adds_dummy_prefix", bool),
    4: ("removes_extra_spaces", bool),
}


def _pick(message: bytes, known: Mapping[int, tuple[str, Any]]) -> dict[str, Any]:
    picked = {}
    for number, value in _fields(message):
        if number in known:
            name, convert = known[number]
            picked[name] = convert(value)
    return picked


def _parse_piece(message: bytes) -> Piece:
    piece = Piece("")
    for number, value in _fields(message):
        match number, value:
            case 1, bytes(text):
                piece = dataclasses.replace(piece, text=text.decode())
            case 2, bytes(score):
                piece = dataclasses.replace(piece, score=struct.unpack("<f", score)[0])
            case 3, int(kind):
                piece = dataclasses.replace(piece, type=PieceType(kind))
    return piece


def _fields(data: bytes) -> Iterator[_Field]:
    """The fields of one message, in order. Raises ValueError or IndexError if it is none."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire_type = key & 7
        if wire_type == 0:
            number, position = _varint(data, position)
            yield key >> 3, number
            continue
        if wire_type == 2:
            size, position = _varint(data, position)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type} at byte {position}")
        if position + size > len(data):
            raise ValueError(f"a field of {size} bytes at byte {position} goes past the end")
        yield key >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """(value, position after it)."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"a number of more than 10 bytes before byte {position}")
