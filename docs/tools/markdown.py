"""Tables of features as Markdown."""

import inspect
import itertools
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from typer.models import OptionInfo, ParameterInfo

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


_OWN: Final = frozenset({"--force", "--model-dir"})


def command_features(function: Callable[..., Any]) -> tuple[Feature, ...]:
    """function: typer makes the command from its annotations. Flags that it has for all settings
    are left out."""
    hints = typing.get_type_hints(function, include_extras=True)
    names = inspect.signature(function).parameters
    declared = {name: typing.get_args(hints[name])[1:] for name in names if name in hints}
    return tuple(_feature(name, *info) for name, info in declared.items() if info)


def _feature(parameter: str, info: ParameterInfo) -> Feature:
    note = (info.help or "").rstrip(".")
    if not isinstance(info, OptionInfo):
        return Feature(parameter, note=note)
    # In an annotation typer takes the first name as a default, which it is not.
    words = map(str, (info.default, *(info.param_decls or ())))
    declared = [word for word in words if word.startswith("-")]
    *others, name = sorted(declared or [f"--{parameter.replace('_', '-')}"], key=len)
    return Feature(name, note=note, other_names=tuple(others), is_ours=name in _OWN)
