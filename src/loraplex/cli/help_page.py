"""--help of commands with many flags, as plain text: each flag is written out, so that it can be
read on a narrow terminal and found by grep. (Tables, which other commands have, cut long flags.)
"""

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

_ARGUMENTS = "Arguments"
_OPTIONS = "Options"


class FlagPage(TyperCommand):
    """A command whose flags stand below the titles of their panels."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings | {"rich_markup_mode": None})

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_flags(self.shown_parameters(ctx), ctx, formatter)

    def shown_parameters(self, ctx: Any) -> list[Any]:
        return self.get_params(ctx)


class GroupFlagPage(TyperGroup):
    """The same for a command that has flags and commands below it."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings | {"rich_markup_mode": None})

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        _write_flags(self.get_params(ctx), ctx, formatter)


def _write_flags(parameters: Iterable[Any], ctx: Any, formatter: Any) -> None:
    """Panels come in the order of their first flags."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for parameter in parameters:
        record = parameter.get_help_record(ctx)
        if record is not None:
            panels.setdefault(_panel(parameter), []).append(record)
    for title, records in panels.items():
        with formatter.section(title):
            formatter.write_dl(records)


def _panel(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return _ARGUMENTS
    return getattr(parameter, "rich_help_panel", None) or _OPTIONS
