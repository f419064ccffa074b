"""Rows of commands, and how a group takes them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup


class CommandRow(NamedTuple):
    """One command of a group."""

    name: str
    target: typer.Typer | Callable[..., None]
    """A group of commands, or the function of one command."""
    panel: str = ""
    """Title above the command in the group's --help."""
    options: Mapping[str, Any] = {}
    """Further arguments for Typer."""


def add_commands(
    group: typer.Typer, rows: Iterable[CommandRow], *, is_hidden: bool = False
) -> None:
    """Add commands. A hidden one works, and --help does not list it."""
    for row in rows:
        options = {"hidden": is_hidden, **row.options}
        if row.panel:
            options["rich_help_panel"] = row.panel
        if isinstance(row.target, typer.Typer):
            group.add_typer(row.target, name=row.name, **options)
        else:
            group.command(row.name, **options)(row.target)


def group_in_order(rows: Iterable[CommandRow]) -> type[TyperGroup]:
    """Return a group that lists its commands in the order of the rows: Typer lists groups last."""
    names = [row.name for row in rows]

    class OrderedGroup(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return sorted(super().list_commands(ctx), key=lambda name: (*names, name).index(name))

    return OrderedGroup
