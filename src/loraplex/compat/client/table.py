"""A table of text with its cells in the middle, between lines of - and +."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Its lines. Every row has as many cells as the header."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"

    def line(cells: Sequence[str]) -> str:
        return "|" + "|".join(f" {c:^{w}} " for c, w in zip(cells, widths, strict=True)) + "|"

    return [rule, line(header), rule, *map(line, rows), rule]
