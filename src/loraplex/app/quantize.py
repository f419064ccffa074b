"""A quantised copy of a model folder, with texts of the user to calibrate it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from loraplex.core.errors import ConfigError, LoraplexError
from loraplex.execution.quantizing.calibration import CalibrationInputs
from loraplex.execution.quantizing.folder import Moments, NoInputs, check_source, quantize_folder
from loraplex.execution.quantizing.report import QuantizeReport
from loraplex.execution.quantizing.rounding import IntegerForm
from loraplex.execution.weights.hub import resolve_model
from loraplex.execution.weights.stored_head import read_model
from loraplex.models.spec import ModelSpec
from loraplex.serving.text.chat_template import ChatTemplate
from loraplex.text.tokenizer import Tokenizer, load_tokenizer

_MAX_FILE_BYTES: Final = 256 << 20
_MAX_TEXT_TOKENS: Final = 2048
"""Tokens of one text that are computed: attention to more takes long and adds little."""


class Calibration(msgspec.Struct, frozen=True):
    """File with texts, and how many of their tokens are computed."""

    path: Path
    max_tokens: int


def quantize(
    model: str,
    output: Path,
    form: IntegerForm,
    calibration: Calibration | None,
    max_shard_bytes: int,
) -> tuple[QuantizeReport, str]:
    """Write a quantised copy of a model folder, or of a hub id.

    Returns the report and what the texts were, for people. Raises ConfigError,
    UnsupportedModelError.
    """
    source = resolve_model(model)
    spec = read_model(source)
    check_source(source, spec)
    inputs: Moments = NoInputs()
    note = "no texts: each weight is rounded by itself"
    if calibration is not None:
        texts = _read_texts(calibration, source, spec)
        inputs = CalibrationInputs(source, spec, texts)
        note = f"{len(texts)} texts with {sum(map(len, texts))} tokens of {calibration.path}"
    report = quantize_folder(source, output, spec, form, inputs, max_shard_bytes)
    return report, note


def _read_texts(calibration: Calibration, source: Path, spec: ModelSpec) -> list[list[int]]:
    """Return token ids of the file's texts until there are enough. Raises ConfigError."""
    tokenizer = load_tokenizer(source)
    longest = min(_MAX_TEXT_TOKENS, spec.default_max_model_len)
    found: list[list[int]] = []
    left = calibration.max_tokens
    for ids in _encoded(calibration.path, source, tokenizer):
        ids = ids[: min(longest, left)]
        if ids:
            found.append(ids)
            left -= len(ids)
        if left <= 0:
            break
    if not found:
        raise ConfigError(f"{calibration.path} has no text to calibrate with")
    largest = max(map(max, found))
    if largest >= spec.vocab_size:
        raise ConfigError(
            f"{calibration.path}: the tokenizer gives token {largest}, the model has "
            f"{spec.vocab_size}"
        )
    return found


def _encoded(path: Path, source: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    text = _read_file(path)
    if path.suffix != ".jsonl":
        for paragraph in text.split("\n\n"):
            if paragraph.strip():
                yield tokenizer.encode(paragraph.strip())
        return
    template = ChatTemplate.load(source, tokenizer.special_tokens)
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield _encoded_line(msgspec.json.decode(line, type=dict[str, Any]), template, tokenizer)
        except (msgspec.MsgspecError, LoraplexError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error


def _encoded_line(
    entry: Mapping[str, Any], template: ChatTemplate, tokenizer: Tokenizer
) -> list[int]:
    text, messages = entry.get("text"), entry.get("messages")
    if isinstance(text, str):
        return tokenizer.encode(text)
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        rendered = template.render(messages, add_generation_prompt=False)
        return tokenizer.encode(rendered, add_special_tokens=False)
    raise ConfigError('a line must be {"text": "..."} or {"messages": [...]}')


def _read_file(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(
                f"{path} has {path.stat().st_size} bytes, at most {_MAX_FILE_BYTES} are read: give "
                "a part of it"
            )
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason}") from error
