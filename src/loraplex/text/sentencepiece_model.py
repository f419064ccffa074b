"""Reads a sentencepiece `tokenizer.model` and builds an equivalent `tokenizers.Tokenizer`.

The file is one protobuf message, ModelProto of sentencepiece's src/sentencepiece_model.proto. Its
descriptor is made here: the module that the sentencepiece package generates for it requires one
particular version of the protobuf runtime, and the gRPC stubs require another.

As in transformers, one space before the text is not distinguished from the one that a model adds.
"""

import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence
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


_UNIGRAM, BPE = 1, 2


@dataclasses.dataclass(frozen=True)
class Piece:
    text: str
    score: float = 0.0
    type: PieceType = PieceType.NORMAL


@dataclasses.dataclass(frozen=True)
class SentencePieceModel:
    """Contents of a tokenizer.model; the defaults are those of the format."""

    pieces: tuple[Piece, ...]
    model_type: int = _UNIGRAM
    byte_fallback: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    charsmap: bytes = b""
    """Compiled rules of text normalization; empty if the text stays as it is."""
    adds_dummy_prefix: bool = True
    removes_extra_spaces: bool = True

    def text_of(self, token_id: int) -> str | None:
        """Return the text of a piece, or None for an id that is out of range.

        A model without BOS may have such an id for it.
        """
        return self.pieces[token_id].text if 0 <= token_id < len(self.pieces) else None


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Read a file; raises ConfigError if it is not a sentencepiece model."""
    from google.protobuf.message import DecodeError  # noqa: PLC0415 - slow import, few models

    try:
        model = _parse_model(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except (DecodeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a sentencepiece model ({error}); a tiktoken file has to be converted "
            "to a tokenizer.json first"
        ) from error
    if model.model_type not in (_UNIGRAM, BPE):
        raise UnsupportedModelError(
            f"{path} is a word or character model; only BPE and Unigram are supported"
        )
    return model


def build_tokenizer(model: SentencePieceModel, config: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer with the model's own special tokens, without those that the folder adds.

    `config` is tokenizer_config.json, of which add_prefix_space and legacy are used: with legacy,
    the space that is put before a text is also put after each special token. Where legacy is
    absent, it is assumed for models that normalize text, not for Llama's.
    """
    tokenizer = Tokenizer(_bpe(model) if model.model_type == BPE else _unigram(model))
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
    """Return every way to join two pieces into a third, best score first."""
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


def _parse_model(data: bytes) -> SentencePieceModel:
    message = _model_message().FromString(data)
    if not message.pieces:
        raise ValueError("it has no pieces")
    trainer, normalizer = message.trainer_spec, message.normalizer_spec
    return SentencePieceModel(
        pieces=tuple(Piece(p.text, p.score, PieceType(p.type)) for p in message.pieces),
        model_type=trainer.model_type,
        byte_fallback=trainer.byte_fallback,
        unk_id=trainer.unk_id,
        bos_id=trainer.bos_id,
        eos_id=trainer.eos_id,
        charsmap=normalizer.precompiled_charsmap,
        adds_dummy_prefix=normalizer.add_dummy_prefix,
        removes_extra_spaces=normalizer.remove_extra_whitespaces,
    )


@functools.cache
def _model_message() -> Any:
    """Return the class of ModelProto, with the fields that are read here and their defaults."""
    from google.protobuf import (  # noqa: PLC0415 - slow import, few models
        descriptor_pb2,
        descriptor_pool,
        message_factory,
    )

    field = descriptor_pb2.FieldDescriptorProto
    text, data, decimal = field.TYPE_STRING, field.TYPE_BYTES, field.TYPE_FLOAT
    number, flag = field.TYPE_INT32, field.TYPE_BOOL  # numbers for enums: none is unknown
    file = descriptor_pb2.FileDescriptorProto(name="model.proto", package="model", syntax="proto2")
    fields: dict[str, Sequence[tuple[int, str, Any, str]]] = {
        "Piece": ((1, "text", text, ""), (2, "score", decimal, "0"), (3, "type", number, "1")),
        "TrainerSpec": (
            (3, "model_type", number, str(_UNIGRAM)),
            (35, "byte_fallback", flag, "false"),
            *(
                (40, "unk_id", number, "0"),
                (41, "bos_id", number, "1"),
                (42, "eos_id", number, "2"),
            ),
        ),
        "NormalizerSpec": (
            (2, "precompiled_charsmap", data, ""),
            (3, "add_dummy_prefix", flag, "true"),
            (4, "remove_extra_whitespaces", flag, "true"),
        ),
    }
    for name, entries in fields.items():
        message = file.message_type.add(name=name)
        for index, key, kind, default in entries:
            label = field.LABEL_OPTIONAL
            message.field.add(name=key, number=index, type=kind, label=label, default_value=default)
    model = file.message_type.add(name="ModelProto")
    parts = (("pieces", "Piece"), ("trainer_spec", "TrainerSpec"))
    for index, (key, name) in enumerate((*parts, ("normalizer_spec", "NormalizerSpec")), 1):
        label = field.LABEL_REPEATED if key == "pieces" else field.LABEL_OPTIONAL
        model.field.add(
            name=key, number=index, type=field.TYPE_MESSAGE, label=label, type_name=f".model.{name}"
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("model.ModelProto"))
