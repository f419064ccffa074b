"""What a part of the benchmark has found so far: JSON lines, written as they come.

Started again with the same file, a part skips what it has: a part may be cut into pieces of a few
minutes. Figures of two pieces are of one file only if code, card and settings are the same.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

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


NO_TIME: Final = "no time was left"


class CellJournal:
    """The cells of one file, by key, and the time that is left for more."""

    def __init__(
        self,
        path: Path,
        header: Header,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Go on with the file, or begin it. Raises ConfigError if it is of something else."""
        self.path = path
        self.header = header
        self.cells: dict[str, Cell] = {}
        self.left_out: dict[str, str] = {}
        """Why figures were not measured now, by their keys; another start may."""
        self._clock = clock
        self._deadline = clock() + seconds
        self._took: dict[float, float] = {}
        """Longest time of figures with one estimate: the next of them may take as long."""
        self._piece = 0
        if path.exists():
            self._read()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(header) + b"\n")

    @property
    def seconds_left(self) -> float:
        return self._deadline - self._clock()

    def begins(self, keys: Iterable[str], seconds: float) -> bool:
        """Return whether work for some of these figures begins: it is needed, and there is time.

        seconds: what it takes before the first of them, about.
        """
        wanted = [key for key in keys if key not in self.cells]
        if wanted and self.seconds_left < seconds:
            self.leave_out(wanted, NO_TIME)
            return False
        return bool(wanted)

    def leave_out(self, keys: Iterable[str], reason: str) -> None:
        """Note those that have no figures, nor a reason yet."""
        for key in keys:
            if key not in self.cells:
                self.left_out.setdefault(key, reason)

    def measure(self, key: str, work: Callable[[], Figures], seconds: float = 0.0) -> Cell | None:
        """The cell of that key, measured unless it is known; None if there is no time.

        seconds: what it takes at most, about; or what another one with this estimate took. Out of
        memory is a result, too.
        """
        if key in self.cells:
            return self.cells[key]
        if self.seconds_left < max(seconds, self._took.get(seconds, 0.0)):
            self.leave_out([key], NO_TIME)
            return None
        start = self._clock()
        try:
            cell = Cell(key=key, figures=work(), piece=self._piece)
        except (MemoryError, RuntimeError, ConfigError) as error:
            if not _is_out_of_memory(error):
                raise
            cell = Cell(key=key, missing="out of memory", piece=self._piece)
        self._took[seconds] = max(self._clock() - start, self._took.get(seconds, 0.0))
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
