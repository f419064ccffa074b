"""One model of a Triton model repository: `NAME/config.pbtxt` and its versions `NAME/1`, ...

A config.pbtxt is a ModelConfig of Triton's model_config.proto in protobuf's text format. A template
that was not filled has `${name}` in it. Within a text it stays, and the reader of the text takes it
for a value that is not set. Elsewhere no parser could read it: such a field counts as not set here,
and has its default. `parameters` are texts by key, read as the original backend reads them.
"""

import dataclasses
import difflib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool, text_format
from tritonclient.grpc import model_config_pb2

from loraplex.compat.triton.setting_rows import Kind, SettingRow
from loraplex.core.config_layers import Layer
from loraplex.core.devices import find_device
from loraplex.core.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Notes:
    infos: list[str] = dataclasses.field(default_factory=list)
    """What is accepted without effect, and what was chosen."""
    warnings: list[str] = dataclasses.field(default_factory=list)
    """What is served in another way than it is written."""

    def info(self, text: str) -> None:
        if text not in self.infos:
            self.infos.append(text)

    def warning(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def log(self) -> None:
        """Log all notes."""
        for text in self.infos:
            logger.info("%s", text)
        for text in self.warnings:
            logger.warning("%s", text)


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


def place_of(path: Path, pattern: str) -> str:
    """Return `FILE, line N` of the first line with a pattern, or the file alone without one."""
    lines = path.read_text(encoding="utf-8").splitlines()
    line = next((i for i, text in enumerate(lines, start=1) if re.search(pattern, text)), None)
    return str(path) if line is None else f"{path}, line {line}"


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


class ModelParameters:
    """Parameters of one model that are filled in."""

    def __init__(self, config: ModelConfigProto, path: Path) -> None:
        """path: of the file, for errors. An empty text and `${name}` count as not set."""
        self._path = path
        self._texts = {
            key: parameter.string_value.strip()
            for key, parameter in config.parameters.items()
            if parameter.string_value.strip() and not is_placeholder(parameter.string_value)
        }

    def __contains__(self, key: str) -> bool:
        return key in self._texts

    @property
    def keys(self) -> list[str]:
        return list(self._texts)

    def text(self, key: str) -> str | None:
        return self._texts.get(key)

    def read(self, row: SettingRow) -> Any:
        """None if it was not said. Raises ConfigError with the file, the line, what is allowed."""
        text = self._texts.get(row.key)
        if text is None:
            return None
        try:
            return _READERS[row.kind](text)
        except ValueError:
            raise self.error(row.key, f"{text!r} is not {row.kind.value}") from None

    def place(self, key: str) -> str:
        """Where a key is written, as a layer of settings calls its source."""
        return place_of(self._path, rf"""key\s*:\s*["']{re.escape(key)}["']""")

    def error(self, key: str, reason: str) -> ConfigError:
        return ConfigError(f"{self.place(key)}: {key}: {reason}")


def _read_bool(text: str) -> bool:
    words = {"True": True, "true": True, "TRUE": True, "1": True}
    words |= {"False": False, "false": False, "FALSE": False, "0": False}
    if text not in words:
        raise ValueError(text)
    return words[text]


def _read_wholes(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


_READERS: Mapping[Kind, Callable[[str], Any]] = {
    Kind.TEXT: str,
    Kind.BOOL: _read_bool,
    Kind.WHOLE: int,
    Kind.NUMBER: float,
    Kind.WHOLES: _read_wholes,
    Kind.ANY: str,
}


CONFIG_FILE = "config.pbtxt"
_FIRST_VERSION = "1"
_VERSION = re.compile(r"[1-9][0-9]{0,8}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    name: str
    path: Path
    config: ModelConfigProto
    parameters: ModelParameters
    unfilled: frozenset[str]
    """Names of top-level or nested fields whose value a template left open."""

    @property
    def pbtxt(self) -> Path:
        return self.path / CONFIG_FILE

    @property
    def version(self) -> str:
        """The newest one, as Triton's default policy has it."""
        versions = [entry.name for entry in self.path.iterdir() if _VERSION.fullmatch(entry.name)]
        return max(versions, key=int, default=_FIRST_VERSION)

    @property
    def version_path(self) -> Path:
        return self.path / self.version

    def line_of(self, field: str) -> str:
        """Where a field is written, for errors: `FILE, line N`, or the file alone."""
        return place_of(self.pbtxt, rf"\b{re.escape(field)}\b\s*[:{{\[]")

    def line_of_tensor(self, name: str) -> str:
        """The same for an input or output."""
        return place_of(self.pbtxt, rf"""name\s*:\s*["']{re.escape(name)}["']""")

    def find_folder(self, written: str) -> Path | None:
        """The folder that a path in the configuration means; None if there is none.

        As it is written, from the working directory; then below the model's own folder. Of an
        absolute path that is not here what follows the model's name is looked for there: a
        repository that is mounted elsewhere.
        """
        path = Path(written).expanduser()
        places = [path, self.path / path, self.version_path / path]
        if path.is_absolute() and self.name in path.parts:
            at = len(path.parts) - 1 - path.parts[::-1].index(self.name)
            places.append(self.path.joinpath(*path.parts[at + 1 :]))
        found = next((place for place in places if place.is_dir()), None)
        return None if found is None else Path(os.path.abspath(found))


def read_model_folders(
    repository: Path, notes: Notes, problems: dict[str, str]
) -> list[ModelFolder]:
    """All models of a repository, by name. Raises ConfigError if there is none.

    Files and hidden folders are no models; a folder without config.pbtxt is left out, and noted.
    problems: gets the reason why a folder cannot be read, by its name.
    """
    try:
        entries = sorted(repository.expanduser().iterdir())
    except OSError as error:
        raise ConfigError(f"cannot read model repository {repository}: {error.strerror}") from error
    folders = []
    for entry in entries:
        if entry.name.startswith(".") or not os.path.isdir(entry):
            continue
        if os.path.isfile(entry / CONFIG_FILE):
            try:
                folders.append(read_model_folder(entry))
            except ConfigError as error:
                problems[entry.name] = error.message
        else:
            notes.warning(f"{entry} is left out: it has no {CONFIG_FILE}")
    if not folders and not problems:
        raise ConfigError(f"model repository {repository} has no folder with a {CONFIG_FILE}")
    return folders


def read_model_folder(path: Path) -> ModelFolder:
    """Raises ConfigError."""
    pbtxt = path / CONFIG_FILE
    config = read_pbtxt(pbtxt)
    if config.name not in ("", path.name):
        raise ConfigError(
            f"{pbtxt}: unexpected directory name '{path.name}' for model '{config.name}', "
            "directory name must equal model name"
        )
    return ModelFolder(
        name=path.name,
        path=path,
        config=config,
        parameters=ModelParameters(config, pbtxt),
        unfilled=unfilled_fields(pbtxt.read_text(encoding="utf-8")),
    )


_KEY = "gpu_device_ids"


def has_gpu() -> bool:
    """Return whether models run on a GPU where nothing sets their device."""
    return find_device().name != "cpu"


def device_layer(folder: ModelFolder, notes: Notes) -> Iterator[Layer]:
    """Parse gpu_device_ids: numbers with commas between them, instances with semicolons.

    Raises ConfigError.
    """
    written = folder.parameters.text(_KEY)
    numbers = [] if written is None else re.split(r"[,;]", written)
    if not all(number.strip().isdigit() for number in numbers):
        raise folder.parameters.error(
            _KEY, f"{written!r} must be numbers of GPUs with commas between them, as 0 or 0,1"
        )
    if written is None:
        return
    if not has_gpu():
        notes.info(f"{folder.name}: {_KEY} has no effect: this machine has no GPU for models")
        return
    device = f"cuda:{int(numbers[0])}"
    if len(numbers) > 1:
        notes.warning(f"{folder.name}: of the GPUs {written} one is used: {device}")
    yield Layer(folder.parameters.place(_KEY), {"models": {folder.name: {"device": device}}})
