"""What a part of the benchmark has found so far: JSON lines, written as they come.

Started again with the same file, a part skips what it has: a part may be cut into pieces of a few
minutes. Figures of two pieces are of one file only if code, card and settings are the same.
"""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from gpu.card import Place
from loraplex.core.errors import ConfigError

Figures = dict[str, float]


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    place: Place
    settings: dict[str, str]


class Cell(msgspec.Struct, frozen=True, kw_only=True, tag="cell"):
    """One measurement, or why there is none."""

    key: str
    figures: Figures = {}
    missing: str = ""
    """Such as: it does not fit."""
    piece: int = 0
    """Which start of the benchmark measured it."""


class CellJournal:
    """The cells of one file, by key, and the time that is left for more."""

    def __init__(self, path: Path, header: Header, seconds: float) -> None:
        """Go on with the file, or begin it. Raises ConfigError if it is of something else."""
        self.path = path
        self.header = header
        self.cells: dict[str, Cell] = {}
        self.left_out: list[str] = []
        """Figures that were skipped because the time was over."""
        self._deadline = time.monotonic() + seconds
        self._piece = 0
        if path.exists():
            self._read()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(header) + b"\n")

    @property
    def seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def measure(self, key: str, work: Callable[[], Figures], seconds: float = 0.0) -> Cell | None:
        """The cell of that key, measured unless it is known; None if there is no time.

        seconds: what it takes at most, about. Out of memory is a result, too.
        """
        if key in self.cells:
            return self.cells[key]
        if self.seconds_left < seconds:
            self.left_out.append(key)
            return None
        try:
            cell = Cell(key=key, figures=work(), piece=self._piece)
        except (MemoryError, RuntimeError, ConfigError) as error:
            if not _is_out_of_memory(error):
                raise
            cell = Cell(key=key, missing="out of memory", piece=self._piece)
        self.add(cell)
        return cell

    def add(self, cell: Cell) -> None:
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(cell) + b"\n")
        self.cells[cell.key] = cell

    def _read(self) -> None:
        content = self.path.read_bytes()
        lines = content.splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # a crash cut it short
            self.path.write_bytes(content[: -len(lines.pop())])
        entries = [msgspec.json.decode(line, type=Header | Cell) for line in lines]
        if not entries or not isinstance(entries[0], Header):
            raise ConfigError(f"{self.path} is no journal: remove it")
        before, now = _identity(entries[0]), _identity(self.header)
        if before != now:
            raise ConfigError(
                f"{self.path} is of {before}, this is {now}: remove it, or name another"
            )
        self.cells = {entry.key: entry for entry in entries if isinstance(entry, Cell)}
        self._piece = 1 + max((cell.piece for cell in self.cells.values()), default=-1)


def _identity(header: Header) -> tuple[str, ...]:
    place = header.place
    settings = (f"{name}={value}" for name, value in sorted(header.settings.items()))
    return (str(place.code.commit), place.card.name, *settings)


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, RuntimeError):
        return type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error).lower()
    return True
