"""Fills the `${name}` of a template, as the backend's fill_template.py does.

The two settings of the queue have a value even if nobody names them; what else is not named stays.
"""

import re
import string
from pathlib import Path

from loraplex.adapters.tensor_file import write_atomically
from loraplex.core.errors import ConfigError

_DEFAULTS = {"max_queue_size": "0", "max_queue_delay_microseconds": "0"}
_PIECE = re.compile(r"\\[,:\\]|.", re.DOTALL)


def parse_substitutions(text: str) -> dict[str, str]:
    r"""`name:value,name:value`; in a value stand `\,`, `\:` and `\\` for what would end it.

    Raises ConfigError that names the pair that is none.
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
    """Raises ConfigError for a name that does not occur. source: where the text is from.

    The queue's settings need not occur: the backend's instructions name them for all models.
    """
    for name in substitutions:
        if name not in text and name not in _DEFAULTS:
            placeholders = sorted(set(re.findall(r"\$\{(\w+)\}", text)))
            there = ", ".join(placeholders) or "no placeholder any more"
            raise ConfigError(f"{name} does not occur in {source}; it has {there}")
    return string.Template(text).safe_substitute(_DEFAULTS | substitutions)


def write_filled(path: Path, text: str) -> None:
    """In place of the template; a reader never sees half of it. Raises ConfigError."""
    target = path.resolve()
    try:
        mode = target.stat().st_mode
        write_atomically(target, [text.encode()])
        target.chmod(mode)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _split(text: str, separator: str) -> list[str]:
    """At separators without a backslash; the backslashes stay."""
    parts = [""]
    for piece in _PIECE.findall(text):
        if piece == separator:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _unescaped(text: str) -> str:
    return re.sub(r"\\([,:\\])", r"\1", text)
