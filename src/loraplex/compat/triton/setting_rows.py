"""Rows of the tables of settings in the files of a repository.

They are parameters of a config.pbtxt and keys of a model.json.
"""

import dataclasses
import enum
from typing import Any

from loraplex.core.support import Feature, Support


class Kind(enum.Enum):
    """Type of a value; the enum value names the allowed ones in errors."""

    TEXT = "a text"
    BOOL = "True, true, TRUE, 1, False, false, FALSE or 0"
    WHOLE = "a whole number"
    NUMBER = "a number"
    WHOLES = "whole numbers with commas between them"
    ANY = "any value"


@dataclasses.dataclass(frozen=True, slots=True)
class SettingRow:
    """Effect of one key. A key that works and has no `setting` is read by name elsewhere."""

    key: str
    kind: Kind
    support: Support
    reason: str = ""
    """What the key does, why it does nothing, or what a refused one would need."""
    setting: str = ""
    """The field of ModelConfig that has its value."""
    neutral: tuple[Any, ...] = ()
    """Values of a refused key that request nothing."""
    is_ours: bool = False
    """Whether no replaced system has the key."""

    @property
    def feature(self) -> Feature:
        note = f"the setting `{self.setting}`" if self.setting else self.reason
        if self.neutral:
            note += f"; {', '.join(f'`{value}`' for value in self.neutral)} may stay"
        form = "" if self.kind is Kind.ANY else self.kind.name.lower()
        return Feature(self.key, self.support, note, form, is_ours=self.is_ours)


def setting(key: str, kind: Kind, field: str = "") -> SettingRow:
    """Return the row of a key that sets a field of ModelConfig."""
    return SettingRow(key, kind, Support.WORKS, setting=field or key)


def here(key: str, kind: Kind, reason: str, *, is_ours: bool = False) -> SettingRow:
    """Return the row of a key that works in another way."""
    return SettingRow(key, kind, Support.WORKS, reason, is_ours=is_ours)


def no_effect(key: str, reason: str, kind: Kind = Kind.ANY) -> SettingRow:
    return SettingRow(key, kind, Support.NO_EFFECT, reason)


def refused(key: str, reason: str, *neutral: Any) -> SettingRow:
    """Return the row of a key that is an error, except for its neutral values."""
    return SettingRow(key, Kind.ANY, Support.REFUSED, reason, neutral=neutral)
