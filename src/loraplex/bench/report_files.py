"""A report as two files: JSON that holds everything, and Markdown to read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from loraplex.bench.machine import Code
from loraplex.core.errors import ConfigError


class DatedReport(Protocol):
    """What names a report's files."""

    @property
    def created(self) -> str:
        """UTC, ISO 8601."""
        ...

    @property
    def code(self) -> Code: ...


def write_dated(
    report: DatedReport, markdown: str, folder: Path, *, kind: str
) -> tuple[Path, Path]:
    """Write `KIND-TIME-COMMIT.json` and `.md` into folder, which is made; gives both paths.

    Raises ConfigError if it cannot be written.
    """
    commit = (report.code.commit or report.code.version)[:12]
    moment = report.created.replace("-", "").replace(":", "").partition("+")[0]
    json_path = folder / f"{kind}-{moment}-{commit}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return write_pair(report, markdown, json_path)
    except OSError as error:
        raise ConfigError(f"cannot write a report into {folder}: {error.strerror}") from error


def write_pair(report: object, markdown: str, json_path: Path) -> tuple[Path, Path]:
    """Both files, of one name. Raises OSError."""
    markdown_path = json_path.with_suffix(".md")
    json_path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    markdown_path.write_text(markdown, encoding="utf-8")
    return json_path, markdown_path


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that is aligned, so that a terminal shows it too."""
    every = [columns, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(columns))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(_line(row, widths) for row in (columns, rule, *rows))


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return f"| {' | '.join(map(str.ljust, row, widths))} |"
