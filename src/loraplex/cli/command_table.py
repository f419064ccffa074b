"""Rows of commands, and how a group takes them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import typer
from typer.core import TyperGroup

from loraplex.cli.flag_hints import UsageError, with_hint

_WORDS: Final = "loraplex.words"
"""Key of the words after the group's name."""


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
    """Return a group that lists its commands in the order of the rows: Typer lists groups last.

    Errors about flags that its commands do not have name the flag that was probably meant.
    """
    names = [row.name for row in rows]

    class OrderedGroup(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return sorted(super().list_commands(ctx), key=lambda name: (*names, name).index(name))

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            ctx.meta[_WORDS] = list(args)
            return super().parse_args(ctx, args)

        def invoke(self, ctx: Any) -> Any:
            words = ctx.meta[_WORDS]
            try:
                return super().invoke(ctx)
            except UsageError as error:
                raise with_hint(error, words) from None

    return OrderedGroup
