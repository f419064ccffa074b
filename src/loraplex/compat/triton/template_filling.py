"""Filling of the `${name}` of a template, as the backend's fill_template.py does.

The two settings of the queue have default values; all other names without a value stay.
"""

import re
import string
from pathlib import Path

from loraplex.adapters.tensor_file import write_atomically
from loraplex.core.errors import ConfigError

_DEFAULTS = {"max_queue_size": "0", "max_queue_delay_microseconds": "0"}
_PIECE = re.compile(r"\\[,:\\]|.", re.DOTALL)


def parse_substitutions(text: str) -> dict[str, str]:
    r"""Parse `name:value,name:value`, with the escapes `\,`, `\:` and `\\` in a value.

    Raises ConfigError that names the wrong pair.
    """
    found = {}
    for pair in _split(text, ","):
        parts = _split(pair, ":")
        if len(parts) != 2 or not parts[0].strip():
            raise ConfigError(
                f"substitutions are NAME:VALUE,NAME:VALUE, got {pair!r}; within a value write "
                r"\: for a colon and \, for a comma"
            )
        found[_unescaped(parts[0])] = _unescaped(parts[1])
    return found


def filled(text: str, substitutions: dict[str, str], source: str) -> str:
    """Fill a text of this source. Raises ConfigError for a name that does not occur.

    The queue's settings need not occur: the backend's instructions name them for all models.
    """
    for name in substitutions:
        if name not in text and name not in _DEFAULTS:
            placeholders = sorted(set(re.findall(r"\$\{(\w+)\}", text)))
            there = ", ".join(placeholders) or "no placeholder any more"
            raise ConfigError(f"{name} does not occur in {source}; it has {there}")
    return string.Template(text).safe_substitute(_DEFAULTS | substitutions)


def write_filled(path: Path, text: str) -> None:
    """Replace the template atomically. Raises ConfigError."""
    target = path.resolve()
    try:
        mode = target.stat().st_mode
        write_atomically(target, [text.encode()])
        target.chmod(mode)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _split(text: str, separator: str) -> list[str]:
    """Split at separators without a backslash; the backslashes stay."""
    parts = [""]
    for piece in _PIECE.findall(text):
        if piece == separator:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _unescaped(text: str) -> str:
    return re.sub(r"\\([,:\\])", r"\1", text)
