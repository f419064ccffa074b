"""Commands made from a program's options, which take the spellings that argparse takes."""

import dataclasses
import importlib
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer

from loraplex.cli.help_page import FlagPage
from loraplex.cli.options import errors_to_exit_code
from loraplex.compat.client.flags import FLAG, Flag

_NUMBER = re.compile(r"-\.?\d")


class AnySpelling(FlagPage):
    """`--flag_name` is `--flag-name`; a flag with several values takes them one after the other."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(self._plain(args)))

    def _plain(self, args: Sequence[str]) -> Iterator[str]:
        """The arguments as click takes them: hyphens, and a flag before each of its values."""
        flags = {name: option for option in self.params for name in option.opts}
        left = list(args)
        while left:
            arg = left.pop(0)
            if arg == "--":
                yield from (arg, *left)
                return
            name, equals, value = arg.partition("=")
            hyphened = name.replace("_", "-") if name.startswith("--") else name
            option: Any = flags.get(hyphened)
            if option is None or option.param_type_name != "option":
                yield arg
            elif getattr(option, "is_flag", False):
                yield f"{hyphened}{equals}{value}"
            elif equals:
                yield from (hyphened, value)
            elif getattr(option, "multiple", False):
                while left and not _is_flag(left[0]):
                    yield from (hyphened, left.pop(0))
            else:
                yield hyphened
                yield from (left.pop(0) for _ in range(min(1, len(left))))


def command_of(options: type[Any], module: str) -> Callable[..., None]:
    """A function for typer: its parameters are the fields of `options`; it runs the module's
    `run(options, say)`, which is imported then, and exits with what that gives.
    """
    kinds = typing.get_type_hints(options)
    fields = dataclasses.fields(options)

    def command(**given: Any) -> None:
        lists = {name: tuple(v) for name, v in given.items() if isinstance(v, list)}
        with errors_to_exit_code():
            program = importlib.import_module(module)
            code = program.run(options(**given | lists), _say)
        if code:
            raise typer.Exit(code)

    command.__signature__ = Signature(  # type: ignore[attr-defined]
        [_parameter(field, kinds[field.name]) for field in fields]
    )
    return command


def _say(line: str) -> None:
    print(line, flush=True)


def _parameter(field: "dataclasses.Field[Any]", kind: Any) -> Parameter:
    flag: Flag = field.metadata[FLAG]
    if typing.get_origin(kind) is tuple:
        kind = list[typing.get_args(kind)[0]]  # type: ignore[misc]
    default = Parameter.empty if field.default is dataclasses.MISSING else field.default
    if isinstance(default, tuple):
        default = list(default)
    show = default not in (Parameter.empty, None, "", []) and default is not False
    if flag.is_positional:
        info = typer.Argument(help=flag.told, show_default=show)
    else:
        info = typer.Option(*flag.names, help=flag.told, show_default=show)
    return Parameter(
        field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def _is_flag(arg: str) -> bool:
    """As argparse sees it: a negative number is a value."""
    return len(arg) > 1 and arg.startswith("-") and not _NUMBER.match(arg)
