"""One row of the tables of what the files of a repository may say.

They are parameters of a config.pbtxt and keys of a model.json.
"""

import dataclasses
import enum
from typing import Any

from loraplex.core.support import Feature, Support


class Kind(enum.Enum):
    """How a value is read; what values there are, for errors."""

    TEXT = "a text"
    BOOL = "True, true, TRUE, 1, False, false, FALSE or 0"
    WHOLE = "a whole number"
    NUMBER = "a number"
    WHOLES = "whole numbers with commas between them"
    ANY = "any value"


@dataclasses.dataclass(frozen=True, slots=True)
class SettingRow:
    """What one key does. One that works and has no `setting` is read by name elsewhere."""

    key: str
    kind: Kind
    support: Support
    reason: str = ""
    """What it does; why it does nothing; what it asks for, of a refused one."""
    setting: str = ""
    """The field of ModelConfig that has its value."""
    neutral: tuple[Any, ...] = ()
    """Of a refused one: the values that ask for nothing."""

    @property
    def feature(self) -> Feature:
        note = f"the setting `{self.setting}`" if self.setting else self.reason
        if self.neutral:
            note += f"; {', '.join(f'`{value}`' for value in self.neutral)} may stay"
        form = "" if self.kind is Kind.ANY else self.kind.name.lower()
        return Feature(self.key, self.support, note, form)


def setting(key: str, kind: Kind, field: str = "") -> SettingRow:
    """Its value is that of a setting of ours."""
    return SettingRow(key, kind, Support.WORKS, setting=field or key)


def here(key: str, kind: Kind, reason: str) -> SettingRow:
    """It works in another way."""
    return SettingRow(key, kind, Support.WORKS, reason)


def no_effect(key: str, reason: str, kind: Kind = Kind.ANY) -> SettingRow:
    return SettingRow(key, kind, Support.NO_EFFECT, reason)


def refused(key: str, reason: str, *neutral: Any) -> SettingRow:
    """It is an error, unless its value asks for nothing."""
    return SettingRow(key, Kind.ANY, Support.REFUSED, reason, neutral=neutral)
