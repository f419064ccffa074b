"""Tables of features as Markdown."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from loraplex.core.support import Feature, Section

_OURS = "loraplex's own"


def page(title: str, about: str, sections: Iterable[Section]) -> str:
    """A whole page; `about` stands below its title."""
    blocks = [f"# {title}", about, *(_section(section) for section in sections)]
    return "\n\n".join(blocks) + "\n"


def _section(section: Section) -> str:
    about = [section.about] if section.about else []
    return "\n\n".join([f"## {section.title}", *about, _table(section.rows)])


def _table(rows: Sequence[Feature]) -> str:
    """Return a table without empty columns; equal neighbours share a row."""
    lines = [_cells(group) for group in _grouped(rows)]
    columns = [i for i in range(4) if i == 0 or any(line[i] for line in lines)]
    head = ("name", "values", "here", "")
    table = [[head[i] for i in columns], ["---"] * len(columns)]
    table += [[line[i] for i in columns] for line in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def _grouped(rows: Sequence[Feature]) -> Iterator[list[Feature]]:
    def alike(row: Feature) -> object:
        said = (row.support, row.note, row.form, row.is_ours)
        return said if row.note and not row.other_names else row.name

    return (list(group) for _, group in itertools.groupby(rows, alike))


def _cells(group: Sequence[Feature]) -> tuple[str, str, str, str]:
    first = group[0]
    names = ", ".join(" ".join(f"`{name}`" for name in row.names) for row in group)
    note = "; ".join(part for part in (first.note, _OURS if first.is_ours else "") if part)
    return _escaped(names), _escaped(first.form), first.support.value, _escaped(note)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")
