"""llgtrt's own files, llgtrt.json5 above all: every key, how files are merged and checked, their
settings of ours, and what --print-config prints.

Files are merged in order: later ones win. Objects are merged at any depth, other values are
replaced; a null is a value like any other.
"""

import dataclasses
import difflib
import enum
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import json5
import msgspec

from loraplex.core.config import ModelConfig, problem
from loraplex.core.config_layers import Layer
from loraplex.core.errors import ConfigError
from loraplex.core.grammar import GrammarLimits
from loraplex.core.support import Feature, Section, Support
from loraplex.models.engine_folder import PACKED_NAME, model_fields
from loraplex.serving.text.chat_template_files import find_templates
from loraplex.text.special_tokens import read_json_object


class Form(enum.Enum):
    """What values there are, for errors."""

    BOOL = "true or false"
    WHOLE = "a whole number of at least 0"
    SHARE = "a number from 0 to 1"
    TEXT = "a string"
    TOKEN = "a token: a string, or an object with its text in 'content'"
    OBJECT = "an object"

    def takes(self, value: Any) -> bool:
        match self:
            case Form.BOOL:
                return isinstance(value, bool)
            case Form.WHOLE:
                return type(value) is int and value >= 0
            case Form.SHARE:
                return type(value) in (int, float) and 0 <= value <= 1
            case Form.TEXT:
                return isinstance(value, str)
            case Form.TOKEN:
                text = value.get("content") if isinstance(value, dict) else value
                return isinstance(text, str) and text != ""
            case Form.OBJECT:
                return isinstance(value, dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One key of one section."""

    name: str
    kind: Form
    note: str
    setting: str = ""
    """The field of ModelConfig that takes its value."""
    support: Support = Support.WORKS
    default: Any = None
    """llgtrt's default, for keys without a setting of ours; None: null."""
    may_be_null: bool = False

    @property
    def feature(self) -> Feature:
        note = f"the setting `{self.setting}`" if self.setting and not self.note else self.note
        return Feature(self.name, self.support, note, self.kind.value)


def _key(name: str, kind: Form, setting: str, note: str = "") -> Key:
    return Key(name, kind, note, setting)


def _no_effect(name: str, kind: Form, default: Any, note: str) -> Key:
    return Key(name, kind, note, "", Support.NO_EFFECT, default, may_be_null=default is None)


_ONE_SIZE: Final = "sizes stay as they are set"

RUNTIME: Final = (
    _key(
        *("guaranteed_no_evict", Form.BOOL, "batch_scheduler_policy"),
        "the setting `batch_scheduler_policy`: guaranteed_no_evict, or max_utilization",
    ),
    _key("max_batch_size", Form.WHOLE, "max_num_seqs"),
    _key("max_num_tokens", Form.WHOLE, "max_num_batched_tokens"),
    _key("max_queue_size", Form.WHOLE, "max_queue_size"),
    _no_effect(
        *("enable_chunked_context", Form.BOOL, True),
        "a prompt longer than a step is always computed in chunks",
    ),
    _key("enable_kv_cache_reuse", Form.BOOL, "enable_prefix_cache"),
    _key("kv_cache_free_gpu_mem_fraction", Form.SHARE, "kv_cache_fraction"),
    _key(
        *("kv_cache_host_memory_megabytes", Form.WHOLE, "kv_cache_host_memory_bytes"),
        "the setting `kv_cache_host_memory_bytes`, in MiB",
    ),
    _no_effect(
        *("kv_cache_onboard_blocks", Form.BOOL, True),
        "blocks in host memory always come back to the device",
    ),
    _no_effect(
        "cross_kv_cache_fraction", Form.SHARE, None, "the encoder's part is sized by itself"
    ),
    _no_effect(
        *("secondary_offload_min_priority", Form.WHOLE, None),
        "the blocks of preempted sequences are kept, whatever their priority",
    ),
    _no_effect(*("event_buffer_max_size", Form.WHOLE, None), "there are no KV cache events"),
    _no_effect("enable_batch_size_tuning", Form.BOOL, True, _ONE_SIZE),
    _no_effect("enable_max_num_tokens_tuning", Form.BOOL, True, _ONE_SIZE),
)

_TOKEN_NOTE: Final = "replaces the one of tokenizer_config.json; null takes it away"

TOKENIZER: Final = (
    Key(
        *("chat_template", Form.TEXT, "replaces the folder's; --chat-template wins"),
        may_be_null=True,
    ),
    Key(
        *("clean_up_tokenization_spaces", Form.BOOL, "replaces the one of tokenizer_config.json"),
        may_be_null=True,
    ),
    *(
        Key(name, Form.TOKEN, _TOKEN_NOTE, may_be_null=True)
        for name in (
            *("eos_token", "bos_token", "unk_token", "sep_token"),
            *("pad_token", "cls_token", "mask_token"),
        )
    ),
    Key(
        *("json_start_token", Form.TEXT, "the special token before a tool call"),
        may_be_null=True,
    ),
    _no_effect(
        *("n_vocab_override", Form.WHOLE, None),
        "the model determines how many tokens it scores",
    ),
)
"""Any other key is one of tokenizer_config.json, and replaces it."""

LIMITS: Final = tuple(
    _key(name, Form.WHOLE, "grammar_limits", f"the setting `grammar_limits.{name}`")
    for name in GrammarLimits.__struct_fields__
)

LLGUIDANCE: Final = (
    Key("limits", Form.OBJECT, "see below"),
    _no_effect(
        *("log_level", Form.WHOLE, 1),
        "the response to a request reports what is wrong with its grammar",
    ),
)

_NO_PLUGIN: Final = "no plugin is run"

PY: Final = (
    Key(
        *("input_processor", Form.TEXT, "a plugin would change the prompts: null serves without"),
        support=Support.REFUSED,
        may_be_null=True,
    ),
    _no_effect("hf_model_dir", Form.TEXT, None, _NO_PLUGIN),
    _no_effect("visual_engine_dir", Form.TEXT, None, _NO_PLUGIN),
    _no_effect("arguments", Form.OBJECT, None, _NO_PLUGIN),
)

SECTIONS: Final = MappingProxyType(
    {"runtime": RUNTIME, "tokenizer": TOKENIZER, "llguidance": LLGUIDANCE, "py": PY}
)


def sections() -> tuple[Section, ...]:
    """The documentation of the file."""
    tables = {**SECTIONS, "llguidance.limits": LIMITS}
    return tuple(
        Section(f"`{title}`", tuple(key.feature for key in keys)) for title, keys in tables.items()
    )


MAX_FILE_BYTES = 16 << 20

KeyPath = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class MergedFiles:
    """The values of all files, and which file said each of them."""

    values: Mapping[str, Any]
    _sources: Mapping[KeyPath, Path]

    def source(self, path: KeyPath) -> Path:
        """The last file that set the value at `path`, or something in it."""
        found = [file for key, file in self._sources.items() if key[: len(path)] == path]
        return found[-1] if found else self._sources[path[:-1]]


def read_json5(path: Path) -> dict[str, Any]:
    """The object in a JSON5 file. Raises ConfigError that names the file, and the place in it."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        value = _parse(text)
    except (ValueError, RecursionError) as error:
        is_deep = isinstance(error, RecursionError)
        reason = "it is nested too deep" if is_deep else str(error).replace("<string>:", "line ")
        raise ConfigError(f"{path} is not JSON5: {reason}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold an object, got {type(value).__name__}")
    return value


def merge_files(paths: Sequence[Path]) -> MergedFiles:
    """Raises ConfigError."""
    values: dict[str, Any] = {}
    sources: dict[KeyPath, Path] = {}
    for path in paths:
        _merge(values, read_json5(path), (), path, sources)
    return MergedFiles(values, sources)


def _parse(text: str) -> Any:
    try:
        # The reader of JSON5 is Python: a tokenizer's whole configuration would take it seconds.
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_number)
    except json.JSONDecodeError:
        return json5.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_number)


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    entries = list(pairs)
    found = dict(entries)
    if len(found) < len(entries):
        names = [name for name, _ in entries]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number that a setting can have")


def _merge(
    into: dict[str, Any],
    values: Mapping[str, Any],
    path: KeyPath,
    file: Path,
    sources: dict[KeyPath, Path],
) -> None:
    for key, value in values.items():
        own_path = (*path, key)
        # Said anew, it comes last.
        sources.pop(own_path, None)
        sources[own_path] = file
        if not isinstance(value, dict):
            into[key] = value
            continue
        if not isinstance(into.get(key), dict):
            into[key] = {}
        _merge(into[key], value, own_path, file, sources)


FILE_NAME: Final = "llgtrt.json5"
PLUGIN_NAME: Final = "input_processor.py"
_MEGABYTE: Final = 1 << 20
_START_TOKEN: Final = "json_start_token"
_SIMILAR: Final = 0.8
"""A key of the tokenizer that is so like a known one is a misspelt one."""
_PATHS: Final = (("py", "hf_model_dir"), ("py", "visual_engine_dir"))


@dataclasses.dataclass(frozen=True, slots=True)
class LlgtrtConfig:
    """The merged files of one server; every key is known and has a value of its kind."""

    files: MergedFiles
    folder: Path
    """The engine's."""

    @property
    def values(self) -> Mapping[str, Any]:
        return self.files.values

    @property
    def tokenizer_overrides(self) -> dict[str, Any]:
        """What replaces entries of tokenizer_config.json."""
        ours = (_START_TOKEN, "n_vocab_override")
        return {k: v for k, v in self._section("tokenizer").items() if k not in ours}

    def layers(self, model: str) -> Iterator[Layer]:
        """Return the settings of a model of this name, each with the file that contains it."""
        for key in SECTIONS["runtime"]:
            path = ("runtime", key.name)
            if key.setting and key.name in self._section("runtime"):
                value = _as_setting(key, self._section("runtime")[key.name])
                yield self._layer(model, path, {key.setting: value})
        for name, value in self._section("llguidance").get("limits", {}).items():
            limit = {"grammar_limits": {name: value}}
            yield self._layer(model, ("llguidance", "limits", name), limit)
        overrides = self.tokenizer_overrides
        if overrides:
            yield self._layer(model, ("tokenizer",), {"tokenizer_config": overrides})
        start_token = self._section("tokenizer").get(_START_TOKEN)
        if start_token is not None:
            yield self._layer(model, ("tokenizer", _START_TOKEN), {_START_TOKEN: start_token})

    def notes(self) -> Iterator[str]:
        """A sentence for each key that is accepted without effect."""
        for section, keys in SECTIONS.items():
            for key in keys:
                value = self._section(section).get(key.name)
                if key.support is Support.NO_EFFECT and value not in (None, key.default):
                    where = self.files.source((section, key.name))
                    yield f"{where}: {section}.{key.name} has no effect: {key.note}"

    def shown_paths(self) -> dict[str, str]:
        """The folders of `py`, which are relative to the file that names them."""
        return {
            name: str(self.files.source((section, name)).parent / self._section(section)[name])
            for section, name in _PATHS
            if self._section(section).get(name) is not None
        }

    def _section(self, name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.values.get(name, {})
        return found

    def _layer(self, model: str, path: KeyPath, settings: Mapping[str, Any]) -> Layer:
        source = f"{self.files.source(path)} ({'.'.join(path)})"
        return Layer(source, {"models": {model: settings}})


def read_config(engine: Path, paths: Iterable[Path]) -> LlgtrtConfig:
    """Read these files or, if there are none, the engine folder's own llgtrt.json5.

    Raises ConfigError: for an unknown key, a value of another kind, or a plugin.
    """
    own = engine / FILE_NAME
    files = merge_files(list(paths) or ([own] if own.is_file() else []))
    _check_section(files, (), files.values, tuple(SECTIONS))
    for section, keys in SECTIONS.items():
        values = files.values.get(section, {})
        _check_object(files, (section,), values)
        _check_keys(files, (section,), values, keys)
    _check_limits(files)
    _check_plugin(files, engine)
    return LlgtrtConfig(files, engine)


def _check_limits(files: MergedFiles) -> None:
    limits = files.values.get("llguidance", {}).get("limits", {})
    _check_keys(files, ("llguidance", "limits"), limits, LIMITS)


def _check_keys(
    files: MergedFiles, path: KeyPath, values: Mapping[str, Any], keys: tuple[Key, ...]
) -> None:
    _check_section(files, path, values, tuple(key.name for key in keys))
    for key in keys:
        if key.name in values:
            _check_value(files, (*path, key.name), key, values[key.name])


def _check_section(
    files: MergedFiles, path: KeyPath, values: Mapping[str, Any], known: tuple[str, ...]
) -> None:
    """The tokenizer's section takes any key of tokenizer_config.json, if it is not misspelt."""
    is_open = path == ("tokenizer",)
    for name in values:
        if name in known:
            continue
        nearest = difflib.get_close_matches(name, known, 1, _SIMILAR if is_open else 0.0)
        if is_open and (not nearest or _is_of_transformers(name)):
            continue
        hint = f"did you mean {'.'.join((*path, nearest[0]))}? " if nearest else ""
        raise _error(files, (*path, name), f"unknown key; {hint}Known: {', '.join(known)}")


def _is_of_transformers(name: str) -> bool:
    """Return whether a key is one of transformers' keys that are no single token."""
    return name.startswith(("add_", "added_", "additional_", "extra_")) or name == "use_fast"


def _check_object(files: MergedFiles, path: KeyPath, value: Any) -> None:
    if not isinstance(value, dict):
        raise _error(files, path, f"must be {Form.OBJECT.value}, got {_shown(value)}")


def _check_value(files: MergedFiles, path: KeyPath, key: Key, value: Any) -> None:
    if value is None and key.may_be_null:
        return
    if not key.kind.takes(value):
        null = " or null" if key.may_be_null else ""
        raise _error(files, path, f"must be {key.kind.value}{null}, got {_shown(value)}")
    if key.setting and path[0] == "runtime":
        wrong = problem(key.setting, _as_setting(key, value))
        if wrong:
            raise _error(files, path, f"{wrong}, got {_shown(value)}")


def _check_plugin(files: MergedFiles, engine: Path) -> None:
    """Refuse a plugin: without it, prompts would differ silently. Raises ConfigError."""
    py = files.values.get("py", {})
    advice = "no Python plugin is run here; py.input_processor: null serves without it"
    if py.get("input_processor") is not None:
        raise _error(files, ("py", "input_processor"), advice)
    if "input_processor" not in py and (engine / PLUGIN_NAME).is_file():
        raise ConfigError(f"{engine / PLUGIN_NAME}: {advice}")


def _as_setting(key: Key, value: Any) -> Any:
    match key.name:
        case "guaranteed_no_evict":
            return "guaranteed_no_evict" if value else "max_utilization"
        case "kv_cache_host_memory_megabytes":
            return value * _MEGABYTE
    return value


def _error(files: MergedFiles, path: KeyPath, text: str) -> ConfigError:
    return ConfigError(f"{files.source(path)}: {'.'.join(path)}: {text}")


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


TEMPLATE_NAME: Final = "chat_template.j2"
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model")
_GOOD: Final = "a Hugging Face folder, or one that loraplex compat build (trtllm-build) wrote"


def check_engine(engine: Path, tokenizer: Path) -> None:
    """Raise ConfigError that names what the folders lack."""
    if not engine.is_dir():
        kind = "a file" if engine.exists() else "not there"
        raise ConfigError(f"--engine {engine}: it is {kind}; give {_GOOD}")
    if not (engine / "config.json").is_file():
        only = f", only {PACKED_NAME}" if (engine / PACKED_NAME).is_file() else ""
        raise ConfigError(f"--engine {engine}: it has no config.json{only}; give {_GOOD}")
    model_fields(engine)
    if not any((tokenizer / name).is_file() for name in _TOKENIZERS):
        raise ConfigError(
            f"{tokenizer} has no tokenizer.json: copy tokenizer.json and tokenizer_config.json "
            "of the base model into it, or name their folder with --tokenizer"
        )


def own_chat_template(engine: Path) -> Path | None:
    """Return the template of the engine folder, which replaces every other one."""
    path = engine / TEMPLATE_NAME
    return path if path.is_file() else None


def shown_config(config: LlgtrtConfig, model: ModelConfig, tokenizer: Path | None) -> str:
    """Return JSON, which is valid JSON5; with the entries of the tokenizer's folder, too."""
    written = config.values
    tokens = read_json_object(tokenizer / "tokenizer_config.json") if tokenizer else {}
    if tokenizer is not None:
        tokens["chat_template"] = chat_template(model, tokenizer)
    sections = {
        "runtime": {key.name: _in_effect(key, model, written) for key in RUNTIME},
        "tokenizer": tokens | dict(written.get("tokenizer", {})),
        "llguidance": {
            "limits": msgspec.structs.asdict(model.grammar_limits),
            **_as_written("llguidance", LLGUIDANCE[1:], written),
        },
        "py": _as_written("py", PY, written) | config.shown_paths(),
    }
    if tokenizer is not None and model.chat_template is not None:
        sections["tokenizer"]["chat_template"] = tokens["chat_template"]
    return json.dumps(sections, indent=2, ensure_ascii=False)


def chat_template(model: ModelConfig, tokenizer: Path) -> str | None:
    """The text of the template that renders conversations; None if there is none."""
    if model.chat_template is not None:
        path = Path(model.chat_template)
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --chat-template {path}: {error}") from error
    if "chat_template" in model.tokenizer_config:
        text: str | None = model.tokenizer_config["chat_template"]
        return text
    return find_templates(tokenizer).get("default")


def _in_effect(key: Key, model: ModelConfig, written: Mapping[str, Any]) -> Any:
    if not key.setting:
        return written.get("runtime", {}).get(key.name, key.default)
    value = getattr(model, key.setting)
    match key.name:
        case "guaranteed_no_evict":
            return value == "guaranteed_no_evict"
        case "kv_cache_host_memory_megabytes":
            return value // _MEGABYTE
    return value


def _as_written(section: str, keys: tuple[Key, ...], written: Mapping[str, Any]) -> dict[str, Any]:
    values = written.get(section, {})
    return {key.name: values.get(key.name, key.default) for key in keys}
