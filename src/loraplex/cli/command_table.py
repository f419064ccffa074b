"""Rows of commands, and how a group takes them."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

import typer
from typer.core import TyperCommand, TyperGroup

from loraplex.compat.triton.setting_rows import row_of
from loraplex.core.support import Support

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


_ARGUMENTS = "Arguments"
_OPTIONS = "Options"
_COMMANDS = "Commands"
_HELP_FLAGS: Final = ("-h", "--help")


class FlagPage(TyperCommand):
    """A command whose flags stand below the titles of their panels."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings | {"rich_markup_mode": None})

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_flags(self.shown_parameters(ctx), ctx, formatter)

    def shown_parameters(self, ctx: Any) -> list[Any]:
        return self.get_params(ctx)


class GroupFlagPage(TyperGroup):
    """The same for a group: its commands stand below the titles of theirs."""

    hints: Mapping[str, str] = MappingProxyType({})
    """What replaces commands that there are not, by name."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings | {"rich_markup_mode": None})

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        _write_flags(self.get_params(ctx), ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                panel = getattr(command, "rich_help_panel", None)
                title = panel if isinstance(panel, str) else _COMMANDS
                panels.setdefault(title, []).append((name, command.get_short_help_str(200)))
        _write_sections(panels, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except UsageError:
            if args[0] in self.commands or args[0].startswith("-"):
                raise
            shown = [name for name in self.commands if not self.commands[name].hidden]
            hint = self.hints.get(args[0]) or _near_command(args[0], shown, ctx.command_path)
            raise UsageError(f"No such command: {args[0]}. {hint}", ctx) from None


class CommandGroup(typer.Typer):
    """Commands whose help has one style: plain text, which a pipe leaves as it is."""

    def __init__(self, *, cls: type[GroupFlagPage] = GroupFlagPage, **settings: Any) -> None:
        super().__init__(cls=cls, rich_markup_mode=None, suggest_commands=False, **settings)

    def command(self, name: str | None = None, **options: Any) -> Callable[..., Any]:
        return super().command(name, **{"cls": FlagPage, **options})


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


def group_in_order(
    rows: Iterable[CommandRow], of_others: Mapping[str, str] = MappingProxyType({})
) -> type[GroupFlagPage]:
    """Return a group that lists its commands in the order of the rows: Typer lists groups last.

    Errors about flags and commands that there are not name those that were probably meant.
    of_others: what replaces the commands of other systems, by name.
    """
    names = [row.name for row in rows]

    class OrderedGroup(GroupFlagPage):
        hints = of_others

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


def _near_command(name: str, names: Sequence[str], path: str) -> str:
    close = difflib.get_close_matches(name, names, 3, _SIMILARITY)
    return f"Did you mean {' or '.join(close)}?" if close else f"See `{path} --help`."


def _write_flags(parameters: Iterable[Any], ctx: Any, formatter: Any) -> None:
    """Panels come in the order of their first flags."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for parameter in parameters:
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        if parameter is ctx.command.get_help_option(ctx):  # Typer adds the type of a value to it
            record = (", ".join(_HELP_FLAGS), record[1])
        panels.setdefault(_panel(parameter), []).append(record)
    _write_sections(panels, formatter)


def _write_sections(sections: Mapping[str, Sequence[tuple[str, str]]], formatter: Any) -> None:
    for title, records in sections.items():
        with formatter.section(title):
            formatter.write_dl(records)


def _panel(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return _ARGUMENTS
    return getattr(parameter, "rich_help_panel", None) or _OPTIONS


UsageError: Final = cast("type[Exception]", typer.BadParameter.__mro__[1])
"""Typer exports only subclasses of the error for a wrong command line."""
_MODEL: Final = "give the model as the argument"
_ALWAYS_FULL: Final = "with --device cuda all layers are on the GPU"
OF_OTHERS: Final = MappingProxyType(
    {
        "-a": "use --name",
        "--alias": "use --name",
        "-c": "use --max-model-len",
        "--ctx-size": "use --max-model-len",
        "--num-ctx": "use --max-model-len",
        "--context-length": "use --max-model-len",
        "-ngl": _ALWAYS_FULL,
        "--gpu-layers": _ALWAYS_FULL,
        "--n-gpu-layers": _ALWAYS_FULL,
        "--lora": "use --adapter NAME=PATH",
        "--lora-scaled": "use --adapter NAME=PATH; the scale is that of the adapter's config",
        "--lora-paths": "use --adapter NAME=PATH",
        "-np": "use --max-num-seqs",
        "--parallel": "use --max-num-seqs",
        "--max-running-requests": "use --max-num-seqs",
        "-b": "use --max-num-batched-tokens",
        "--batch-size": "use --max-num-batched-tokens",
        "-ub": "use --max-prefill-chunk",
        "-t": "use --num-threads",
        "--threads": "use --num-threads",
        "-fa": "the fastest attention is chosen: see --attention-backend",
        "--flash-attn": "the fastest attention is chosen: see --attention-backend",
        "-ctk": "use --kv-dtype",
        "--cache-type-k": "use --kv-dtype",
        "--jinja": "chat templates are always read as Jinja: leave it out",
        "--chat-template-file": "use --chat-template",
        "--api-key-file": "use --api-keys-file",
        "--mem-fraction-static": "use --kv-cache-fraction",
        "--num-gpu": _ALWAYS_FULL,
        "--gpu-memory-fraction": "use --kv-cache-fraction",
        "--num-thread": "use --num-threads",
        "--num-batch": "use --max-num-batched-tokens",
        "--num-parallel": "use --max-num-seqs",
        "--num-predict": "use --max-tokens",
        "-n": "use --max-tokens",
        "--n-predict": "use --max-tokens",
        "--repeat-penalty": "use --repetition-penalty",
        "--main-gpu": "use --device cuda:N",
        "--mlock": "weights stay in memory: leave it out",
        "--no-mmap": "weights are mapped where that is faster: leave it out",
        "--keepalive": "a model stays in memory: leave it out",
        "--keep-alive": "a model stays in memory: leave it out",
        "--verbose": "use --log-level debug",
        "-v": "use --log-level debug",
        "--speculative-config": "use --num-draft-tokens: draft tokens are those of the prompt",
        "--disable-log-stats": "metrics are always there: leave it out",
    }
)
"""Flags of llama.cpp, Ollama and SGLang, and those of vLLM that are another setting here."""
_ADAPTERS: Final = "`loraplex adapters --help` has the commands for adapters of a running server"
OF_VERBS: Final = MappingProxyType(
    {
        "list": "Use `loraplex cache list` for models on the disk, or `loraplex adapters list` for "
        "the adapters of a running server.",
        "ls": "Use `loraplex cache list`, or `loraplex adapters list`.",
        "ps": "Use `loraplex adapters list` for a running server; `loraplex cache list` shows the "
        "processes that use a model.",
        "pull": "Use `loraplex serve MODEL` or `loraplex run MODEL`: a model of the hub is "
        "downloaded when it is first used.",
        "push": "Use the hub's own program: loraplex uploads nothing.",
        "chat": "Use `loraplex run MODEL`, or `loraplex run http://HOST:PORT` with a running "
        "server.",
        "complete": "Use `loraplex generate MODEL PROMPT`.",
        "run-batch": "Send the requests to a running server: examples/batch_file.py does.",
        "start": "Use `loraplex serve MODEL`.",
        "server": "Use `loraplex serve MODEL`.",
        "stop": "Press Ctrl+C in the terminal of `loraplex serve`, or send it SIGTERM; `loraplex "
        "adapters unload NAME` unloads an adapter.",
        "rm": "Use `loraplex cache clean --model MODEL` for the files of a model, or `loraplex "
        "adapters unload NAME` for an adapter.",
        "show": "Use `loraplex plan MODEL` for a model, or `loraplex adapters show NAME` for an "
        "adapter.",
        "create": "Use `loraplex serve MODEL --adapter NAME=PATH`: there is no Modelfile.",
        "cp": "Use `loraplex adapters alias NAME ALIAS`.",
        "load": f"Use `loraplex adapters load NAME SOURCE`: {_ADAPTERS}.",
        "unload": f"Use `loraplex adapters unload NAME`: {_ADAPTERS}.",
        "rollback": f"Use `loraplex adapters rollback NAME`: {_ADAPTERS}.",
        "clean": "Use `loraplex cache clean`.",
        "collect-env": "Use `loraplex --version`; the log of `loraplex serve` has the device.",
        "help": "Use `loraplex --help`, or `loraplex COMMAND --help`.",
        "version": "Use `loraplex --version`.",
    }
)
"""Commands of Ollama, vLLM and others, and of our groups where the group is left out."""
OF_MODELS: Final = frozenset({"-m", "--model", "--model-path", "-hf", "--hf-repo"})
"""Other systems' flags for the model, which is an argument here."""
_TAKEN_BY_SERVE: Final = frozenset({"--max-num-seqs", "--help-all"})
"""Flags of the command that takes flags of vLLM, `loraplex serve`."""
_HELP: Final = frozenset({"--help", "--help-all"})
_SIMILARITY: Final = 0.72
"""Least likeness of a name that is suggested, from 0 to 1: less likely ones mislead."""


def with_hint(error: Exception, words: Sequence[str]) -> Exception:
    """Return an error about a flag that does not exist with a hint; other errors as they are.

    words: the command line, for flags of which the parser names only the first letter.
    """
    if not hasattr(error, "possibilities"):
        return error
    context = cast("Any", error).ctx
    flag = _whole_flag(str(getattr(error, "option_name", "")), words)
    return UsageError(f"No such option: {flag}. {_hint(flag, context)}", context)


def flags_of(context: Any) -> set[str]:
    """Return all flags of a context's command."""
    parameters = context.command.get_params(context)
    return {
        flag
        for p in parameters
        if p.param_type_name == "option"
        for flag in (*p.opts, *p.secondary_opts)
    }


def _hint(flag: str, context: Any) -> str:
    known = flags_of(context)
    path = context.command_path
    if text := _of_others(flag, known):
        return f"{_capital(text)}."
    if flag in OF_MODELS and any(p.name == "model" for p in context.command.params):
        return f"{_capital(_MODEL)}: `{path} MODEL`."
    if known >= _TAKEN_BY_SERVE and (text := _of_vllm(flag)):
        return text
    by_name = {name.lstrip("-"): name for name in known if name.startswith("--")}
    close = difflib.get_close_matches(flag.lstrip("-"), by_name, 3, _SIMILARITY)
    if close:
        return f"Did you mean {' or '.join(by_name[name] for name in close)}?"
    return f"See `{path} {max(known & _HELP, key=len)}`."


def _of_others(flag: str, known: Set[str]) -> str:
    """Return what replaces a flag of another server; empty: the command has no such flag."""
    text = OF_OTHERS.get(flag, "")
    return text if named_flags(text) <= known else ""


def named_flags(text: str) -> set[str]:
    """Return the flags that a text names."""
    return {word.rstrip(":;,") for word in text.split() if word.startswith("-")}


def _whole_flag(flag: str, words: Sequence[str]) -> str:
    """Return the word of a flag of which the parser names only the first letter."""
    names = [word.partition("=")[0] for word in words]
    if flag in names:
        return flag
    return next((n for n in names if n.startswith(flag) and not n.startswith("--")), flag)


def _of_vllm(flag: str) -> str:
    """Return what an engine argument of vLLM does here; empty: the flag is none."""
    try:
        row = row_of(flag.removeprefix("--").removeprefix("no-").replace("-", "_"))
    except ValueError:
        return ""
    match row.support:
        case Support.NO_EFFECT:
            return f"vLLM's flag has no effect here ({row.reason}): leave it out."
        case Support.REFUSED:
            return f"vLLM's flag is not served ({row.reason}): leave it out."
    return f"As vLLM's flag: {row.reason or f'the setting {row.setting}'}."


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
