"""The one description of a setting, from which its flag, its help, its checks and its row in
docs/settings.md are made.

A settings struct annotates each field: `Annotated[int, Setting("Server", "Port", minimum=0)]`.
"""

import dataclasses
import enum
import functools
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.errors import ConfigError

_INT64_MAX: Final = 2**63 - 1

Check = Callable[[Any], str | None]
"""Returns what is wrong with a value, as the end of a sentence; None: nothing is."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Metadata of one field of a settings struct."""

    group: str = dataclasses.field(kw_only=False)
    """Title of the flag's panel in --help, and of its table in the documentation."""
    summary: str = dataclasses.field(kw_only=False)
    """A noun phrase with its unit and without a full stop: the whole help of the flag."""
    details: str = dataclasses.field(default="", kw_only=False)
    """Sentences in Markdown that only the documentation has."""
    default: str = ""
    """Description of the default where the value itself does not describe it."""
    minimum: float | None = None
    maximum: float = _INT64_MAX
    """Applies to settings with a minimum; larger integers cannot be sent to the engine."""
    choices: tuple[str, ...] = ()
    """All values of a text; those of an enumeration need not be repeated here."""
    check: Check | None = None
    aliases: tuple[str, ...] = ()
    """Other names of the setting, mostly TensorRT-LLM's."""
    value_aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other systems' words for values."""
    advice: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What to do in place of other systems' values that are not among the choices."""
    flag: str = ""
    """Name of the flag where it is not the setting's."""
    is_file_only: bool = False
    """The setting belongs to one model: it has no environment variable and no generated flag."""
    has_commas: bool = True
    """A text that stands for a list is divided at its commas."""


class SettingField(NamedTuple):
    """One field of a settings struct."""

    name: str
    kind: Any
    """The type without `| None`."""
    value: Any
    """The default; msgspec.NODEFAULT: the setting is required."""
    setting: Setting

    @property
    def choices(self) -> tuple[str, ...]:
        if isinstance(self.kind, type) and issubclass(self.kind, enum.StrEnum):
            return tuple(self.kind)
        return self.setting.choices

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.kind) is tuple

    @property
    def is_mapping(self) -> bool:
        """Whether it has a number for each of some names."""
        return self.kind in (dict[str, int], dict[str, float])

    @property
    def is_bytes(self) -> bool:
        return self.name.endswith("_bytes")

    @property
    def flag(self) -> str:
        return self.setting.flag or self.name.replace("_", "-")

    @property
    def default(self) -> str:
        """The default as --help and the documentation show it."""
        if self.setting.default or self.value is msgspec.NODEFAULT:
            return self.setting.default or "required"
        if isinstance(self.value, bool):
            return "on" if self.value else "off"
        if self.value in (None, "", ()):
            return "none"
        if self.is_bytes:
            return readable_bytes(self.value)
        return f"{self.value:g}" if isinstance(self.value, float) else str(self.value)

    @property
    def help(self) -> str:
        return f"{self.setting.summary} (default: {self.default})."

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a value, as the end of a sentence."""
        setting = self.setting
        if value is None:
            return None
        if self.choices and value not in self.choices:
            advice = setting.advice.get(value.lower(), "") if isinstance(value, str) else ""
            known = ", ".join((*self.choices, *setting.value_aliases))
            return f"{f'{advice}; ' if advice else ''}must be one of {known}"
        if setting.check is not None and (wrong := setting.check(value)):
            return wrong
        if setting.minimum is None:
            return None
        if not value >= setting.minimum:  # true for NaN, too
            return f"must be at least {setting.minimum}"
        return f"must be at most {setting.maximum}" if value > setting.maximum else None


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the settings structs: an instance has only values that its fields' metadata allow."""

    def __post_init__(self) -> None:
        """Raises ConfigError for the first value that is not allowed; its param is the field."""
        for field in setting_fields(type(self)).values():
            value = getattr(self, field.name)
            if wrong := field.problem(value):
                got = ", ".join(map(str, value)) if isinstance(value, tuple) else repr(value)
                raise ConfigError(f"{field.name} {wrong}, got {got}", param=field.name)


@functools.cache
def setting_fields(settings: type[msgspec.Struct]) -> Mapping[str, SettingField]:
    """Return the fields of a settings struct that have metadata, by name and in their order."""
    found = {}
    for field in msgspec.structs.fields(settings):
        if typing.get_origin(field.type) is not typing.Annotated:
            continue
        declared, *metadata = typing.get_args(field.type)
        setting = next((entry for entry in metadata if isinstance(entry, Setting)), None)
        if setting is not None:
            kinds = [part for part in _alternatives(declared) if part is not types.NoneType]
            found[field.name] = SettingField(field.name, kinds[0], field.default, setting)
    return found


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def within(low: float, high: float, text: str) -> Check:
    """Check that a number, or each number of a list, is in a range; `text` describes the range."""

    def check(value: Any) -> str | None:
        numbers = value if isinstance(value, tuple) else (value,)
        return None if all(low <= number <= high for number in numbers) else text

    return check


def matching(pattern: str, text: str) -> Check:
    """Check that a text, or each text of a list, matches; `text` describes what does."""
    compiled = re.compile(pattern)

    def check(value: Any) -> str | None:
        texts = value if isinstance(value, tuple) else (value,)
        return None if all(compiled.fullmatch(part) for part in texts) else text

    return check


def fraction(value: float) -> str | None:
    """Check that a number is a share of something."""
    return None if 0 < value <= 1 else "must be more than 0 and at most 1"
