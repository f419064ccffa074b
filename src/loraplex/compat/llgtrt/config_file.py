"""llgtrt.json5 as settings of ours: checked key by key, what has no effect is said."""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from loraplex.compat.llgtrt.config_keys import LIMITS, SECTIONS, Key, Kind
from loraplex.compat.llgtrt.json5_files import KeyPath, MergedFiles, merge_files
from loraplex.core.config import problem
from loraplex.core.config_layers import Layer
from loraplex.core.errors import ConfigError
from loraplex.core.support import Support

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
        raise _error(files, path, f"must be {Kind.OBJECT.value}, got {_shown(value)}")


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
