"""Two servers' responses to one call, and the differences between them that are intended.

Error texts are alike if ours has all words of the real one's: ours may go on, and name the values
that would be right. What the real one puts in front of some, `[request id: ...]`, does not count.
"""

import dataclasses
import re
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from support.both_tritons.responses import Response

OUTCOME = "outcome"
"""Field for the whole response, if one server serves a call and the other refuses it."""
_OK = ("OK", 200)
_KEYS = {"calls", "field", "real", "ours", "why"}
_ABSENT = "(absent)"
_REQUEST_ID = re.compile(r"^(in ensemble '[^']*', )?\[request id: [^\]]*\] ")
_NOTE = re.compile(r" NOTE: Setting a non-zero max_batch_size .*", re.DOTALL)
"""Triton's advice to the model's author, at the end of an error about shapes."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A field in which the servers differ."""

    calls: tuple[str, ...]
    """Names of calls, or patterns with `*`: each is shown by one call at least."""
    field: str
    """A name, or a pattern."""
    real: str
    """Regular expression for the real Triton's whole value: text as it is, any other value in
    Python notation, `(absent)` for none."""
    ours: str
    why: str

    def is_of(self, call: str, *patterns: str) -> bool:
        """Return whether the difference applies to a call; patterns restrict its calls."""
        return any(_is_like(call, pattern) for pattern in patterns or self.calls)

    def has(self, field: str, ours: str, real: str) -> bool:
        """Whether a field in which they differ does so in the way that is listed."""
        return (
            _is_like(field, self.field)
            and re.fullmatch(self.ours, ours, re.DOTALL) is not None
            and re.fullmatch(self.real, real, re.DOTALL) is not None
        )


def read_differences(path: Path) -> tuple[Difference, ...]:
    """Raises AssertionError for a row that is not whole."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["difference"]
    for row in rows:
        assert set(row) == _KEYS, f"a difference has {sorted(_KEYS)}: {row}"
        assert row["why"], f"why? {row}"
    return tuple(Difference(**(row | {"calls": tuple(row["calls"])})) for row in rows)


def differing(ours: Response, real: Response) -> dict[str, tuple[str, str]]:
    """Return the differing fields, each with our value and the real Triton's."""
    if (ours.get("status") in _OK) != (real.get("status") in _OK):
        return {OUTCOME: (_outcome(ours), _outcome(real))}
    said = {
        field: (_text(ours, field), _text(real, field)) for field in dict.fromkeys([*real, *ours])
    }
    return {
        field: texts
        for field, texts in said.items()
        if texts[0] != texts[1] and not (field.endswith("error") and _says_as_much(*texts))
    }


def unlisted(
    ours: Response, real: Response, call: str, differences: Sequence[Difference]
) -> dict[str, tuple[str, str]]:
    """Those of `differing` that no difference has."""
    rows = [row for row in differences if row.is_of(call)]
    return {
        field: texts
        for field, texts in differing(ours, real).items()
        if not any(row.has(field, *texts) for row in rows)
    }


def _says_as_much(ours: str, real: str) -> bool:
    words = _NOTE.sub("", _REQUEST_ID.sub("", real)).strip().rstrip(".")
    return bool(words) and words in ours


def _outcome(response: Response) -> str:
    if "error" in response:
        return f"{response['status']}: {response['error']}"
    return f"{response.get('status')}: {response.get('outputs', '')}"


def _text(response: Response, field: str) -> str:
    value = response.get(field, _ABSENT)
    return value if isinstance(value, str) else repr(_in_order(value))


def _in_order(value: Any) -> Any:
    """Objects have no order, lists do."""
    if isinstance(value, dict):
        return {key: _in_order(value[key]) for key in sorted(value)}
    return [_in_order(item) for item in value] if isinstance(value, list) else value


def _is_like(name: str, pattern: str) -> bool:
    """Brackets stand for themselves."""
    return fnmatchcase(name, pattern.replace("[", "[[]"))
