"""Tables that read well as text, too."""

from collections.abc import Sequence


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that is aligned, so that a terminal shows it too."""
    every = [columns, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(columns))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(_line(row, widths) for row in (columns, rule, *rows))


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return f"| {' | '.join(map(str.ljust, row, widths))} |"
