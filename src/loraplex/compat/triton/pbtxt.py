"""Reads a `config.pbtxt`: a ModelConfig of Triton's model_config.proto in protobuf's text format.

A template that was not filled has `${name}` in it. Within a text it stays, and the one who reads
the text takes it for "not said". Elsewhere no parser could read it: such a field counts as not
said here, and has its default.
"""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool, text_format
from tritonclient.grpc import model_config_pb2

from loraplex.core.errors import ConfigError

ModelConfigProto = Any
"""A model_config_pb2.ModelConfig: tritonclient ships it without types."""

_MAX_BYTES = 1 << 20
_PLACEHOLDER = r"\$\{\w+\}"
_FIELD = re.compile(rf"\w+\s*:\s*(?:{_PLACEHOLDER}|\[\s*{_PLACEHOLDER}\s*\])")
_TYPE_FIELD = re.compile(rf"(data_type\s*:\s*)({_PLACEHOLDER})")
_UNFILLED = re.compile(rf"""(\w+)\s*:\s*\[?\s*["']?{_PLACEHOLDER}["']?""")
_COMMENT_OR_TEXT = re.compile(r"""#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""")
_DEFAULT_TYPE = "TYPE_FP32"
"""Type of a tensor whose type was not filled in: that of the templates' logits."""


def read_pbtxt(path: Path) -> ModelConfigProto:
    """Raises ConfigError that names file, line and what is wrong there."""
    return parse_pbtxt(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Read a config.pbtxt, or a template of one. Raises ConfigError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path} has {len(content)} bytes; at most {_MAX_BYTES} are read")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason}") from error


def parse_pbtxt(text: str, source: str) -> ModelConfigProto:
    """source: where the text is from, for errors."""
    config = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(without_placeholders(text), config)
    except text_format.ParseError as error:
        line = error.GetLine()
        place = source if line is None else f"{source}, line {line}"
        reason = re.sub(r"^\d+:\d+ : ", "", str(error))
        raise ConfigError(f"{place}: {reason}{_what_would_be_right(reason)}") from error
    return config


def is_placeholder(value: str) -> bool:
    """Return whether a text is `${name}` as a whole, which was not filled in."""
    return re.fullmatch(_PLACEHOLDER, value.strip()) is not None


def without_placeholders(text: str) -> str:
    """The text without fields that a placeholder stands for; every line stays where it is."""
    pieces, end = [], 0
    for kept in _COMMENT_OR_TEXT.finditer(text):
        pieces += [_blanked(text[end : kept.start()]), kept.group()]
        end = kept.end()
    return "".join([*pieces, _blanked(text[end:])])


def unfilled_fields(text: str) -> frozenset[str]:
    """The names of the fields that a placeholder stands for, as a whole or in quotes."""
    return frozenset(field[1] for field in _UNFILLED.finditer(text))


def _what_would_be_right(reason: str) -> str:
    """reason: protobuf's own words, which name a message or an enumeration, and what it lacks."""
    pool = descriptor_pool.Default()
    field = re.search(r'Message type "([\w.]+)" has no field named "(\w+)"', reason)
    if field:
        names = [row.name for row in pool.FindMessageTypeByName(field[1]).fields]
        return f"; {_closest(field[2], names)}"
    value = re.search(r'Enum type "([\w.]+)" has no value named (\w+)', reason)
    if value:
        names = [row.name for row in pool.FindEnumTypeByName(value[1]).values]
        return f"; {_closest(value[2], names)}"
    return ""


def _closest(word: str, names: Sequence[str]) -> str:
    meant = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {meant[0]}?" if meant else f"there are {', '.join(names)}"


def _blanked(code: str) -> str:
    """code: neither comments nor texts."""
    code = _TYPE_FIELD.sub(lambda field: field[1] + _DEFAULT_TYPE, code)
    return _FIELD.sub(lambda field: re.sub(r"[^\n]", " ", field.group()), code)
