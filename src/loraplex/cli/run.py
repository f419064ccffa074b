"""`loraplex run`: chat in the terminal, with an engine in this process or with a server."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

import typer

from loraplex.cli.chat_sources import (
    ChatSource,
    LocalSource,
    Message,
    OutputPiece,
    ServerSource,
    read_together,
)
from loraplex.cli.options import (
    BASE,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    errors_to_exit_code,
    local_adapters,
    near,
    with_demo,
)
from loraplex.cli.server_client import ServerClient
from loraplex.cli.settings_flags import with_settings
from loraplex.core.environment import state_directory
from loraplex.core.errors import ConfigError, LoraplexError
from loraplex.core.sampling_params import SamplingParams

_MAX_LINES: Final = 1000
"""Maximum number of lines in the file of the history."""


@contextlib.contextmanager
def line_editing(
    completions: Callable[[str], Sequence[str]], history: Path | None
) -> Iterator[None]:
    """Complete words, and keep the lines in a file that only the user may read; None: keep none.

    completions: returns the words that the last word of a line may become.
    """
    try:
        import readline  # noqa: PLC0415
    except ImportError:  # a Python built without it: lines are read as the terminal gives them
        yield
        return
    found: list[str] = []

    def complete(_: str, index: int) -> str | None:
        if index == 0:
            found[:] = completions(readline.get_line_buffer()[: readline.get_endidx()])
        return found[index] if index < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")
    kept = history if history is not None and _is_writable(history) else None
    if kept is not None:
        readline.read_history_file(kept)
        readline.set_history_length(_MAX_LINES)
    try:
        yield
    finally:
        readline.set_completer(None)
        if kept is not None:
            readline.write_history_file(kept)


def _is_writable(history: Path) -> bool:
    """Create the file if it is missing; return whether the history can be kept there."""
    try:
        history.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(history, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError as error:
        print(f"The history is not kept: {history}: {error.strerror}", file=sys.stderr)
        return False
    return True


_QUOTES: Final = '"""'
_NO_TEMPLATE: Final = "The model has no chat template: it completes each text without earlier ones."
_MAX_SHOWN: Final = 50
"""Maximum number of adapters that are listed."""
_MAX_COMPARED: Final = 16
"""Maximum number of adapters that run one prompt; a default server batches the base with them."""
_HELP: Final[Mapping[str, str]] = MappingProxyType(
    {
        "/adapter [NAME]": "use an adapter; without a name: list them",
        "/base": "use the base model",
        "/compare PROMPT": "complete one prompt with the base model and every adapter",
        "/system [TEXT]": "set the system message; without a text: remove it",
        "/set [NAME VALUE]": "set a sampling option, such as temperature 0.7; none: its default",
        "/retry": "generate the last output again",
        "/clear": "forget the conversation",
        "/help": "list the commands",
        "/bye": "end (also Ctrl-D)",
    }
)
_ENDS: Final = ("/bye", "/exit", "/quit")
_COMMANDS: Final = tuple(usage.split()[0] for usage in _HELP)
_OPTIONS: Final[Mapping[str, type]] = MappingProxyType(
    {
        "max_tokens": int,
        "temperature": float,
        "top_p": float,
        "top_k": int,
        "min_p": float,
        "seed": int,
        "stop": str,
        "repetition_penalty": float,
        "presence_penalty": float,
        "frequency_penalty": float,
    }
)


class ChatSession:
    """State of a conversation, and its commands."""

    def __init__(
        self,
        source: ChatSource,
        options: Mapping[str, Any],
        read_line: Callable[[str], str] = input,
        *,
        adapter: str | None = None,
        is_verbose: bool = False,
    ) -> None:
        """Begin a conversation. read_line: returns a line after a prompt; EOFError ends.

        Raises LoraplexError for an unknown adapter or a wrong option.
        """
        self._source = source
        self._options = _valid(options)
        self._read_line = read_line
        self._adapter = None if adapter is None else self._known(adapter)
        self._is_verbose = is_verbose
        self._system: list[Message] = []
        self._messages: list[Message] = []
        if not source.has_chat_template:
            print(_NO_TEMPLATE, file=sys.stderr)
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/adapter": self._use,
            "/base": self._use_base,
            "/compare": self._compare,
            "/system": self._set_system,
            "/set": self._set,
            "/retry": self._retry,
            "/clear": self._clear,
            "/help": self._help,
        }

    def run(self) -> None:
        """Read and reply until the user ends it."""
        was_interrupted = False
        while True:
            try:
                text = self._read()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                if was_interrupted:
                    return
                print("Press Ctrl-C again to end.")
                was_interrupted = True
                continue
            was_interrupted = False
            try:
                if text in _ENDS:
                    return
                self._take(text)
            except LoraplexError as error:
                print(f"Error: {error.message}")

    def reply(self, text: str) -> None:
        """Print the output to one message. Raises LoraplexError, and then forgets the message."""
        message = {"role": "user", "content": text}
        messages = [*self._system, *self._messages, message]
        stream = self._source.stream(messages, self._adapter, self._options)
        output: list[str] = []
        try:
            with read_together([stream]) as [pieces]:
                self._print_output(pieces, output)
        except KeyboardInterrupt:
            print("\n(stopped)")
        self._messages += [message, {"role": "assistant", "content": "".join(output)}]

    def completions(self, line: str) -> list[str]:
        """Return the words that the last word of a line may become."""
        *before, word = line.split(" ")
        known: Iterable[str] = ()
        if not before:
            known = _COMMANDS
        elif before == ["/adapter"]:
            known = self._source.adapters()
        elif before == ["/set"]:
            known = _OPTIONS
        return [name for name in known if name.startswith(word)]

    def _read(self) -> str:
        """Read a line, or the lines between triple quotes."""
        text = self._read_line(f"{self._adapter or BASE}> ").strip()
        if not text.startswith(_QUOTES):
            return text
        text = text.removeprefix(_QUOTES)
        while not text.endswith(_QUOTES):
            text += "\n" + self._read_line("... ").rstrip()
        return text.removesuffix(_QUOTES).strip("\n")

    def _take(self, text: str) -> None:
        """Obey a command, or reply to a message. Raises LoraplexError."""
        name, _, argument = text.partition(" ")
        if not text.startswith("/"):
            if text:
                self.reply(text)
        elif name in self._commands:
            self._commands[name](argument.strip())
        else:
            raise ConfigError(f"there is no command {name}{near(name, _COMMANDS)}; try /help")

    def _help(self, _: str) -> None:
        for usage, text in _HELP.items():
            print(f"  {usage:18} {text}")
        print(f"  {_QUOTES:18} begin and end a text of several lines")

    def _use_base(self, _: str) -> None:
        self._adapter = None

    def _set_system(self, text: str) -> None:
        self._system = [{"role": "system", "content": text}] if text else []

    def _clear(self, _: str) -> None:
        self._messages.clear()

    def _use(self, name: str) -> None:
        if name:
            self._adapter = self._known(name)
            return
        names = self._source.adapters()
        for shown in [BASE, *names[:_MAX_SHOWN]]:
            print(f"{'*' if shown == (self._adapter or BASE) else ' '} {shown}")
        if len(names) > _MAX_SHOWN:
            print(f"  and {len(names) - _MAX_SHOWN} more")

    def _known(self, name: str) -> str:
        names = self._source.adapters()
        if name not in names:
            raise ConfigError(f"there is no adapter {name!r}{near(name, names)}")
        return name

    def _compare(self, text: str) -> None:
        if not text:
            raise ConfigError("/compare needs a prompt")
        names = self._source.adapters()
        compared = [None, *names[:_MAX_COMPARED]]
        messages = [*self._system, {"role": "user", "content": text}]
        streams = [self._source.stream(messages, name, self._options) for name in compared]
        try:
            with read_together(streams) as outputs:
                for name, pieces in zip(compared, outputs, strict=True):
                    print(f"--- {name or BASE}")
                    try:
                        self._print_output(pieces, [])
                    except LoraplexError as error:
                        print(f"Error: {error.message}")
        except KeyboardInterrupt:
            print("\n(stopped)")
        if len(names) > _MAX_COMPARED:
            print(f"These are the first {_MAX_COMPARED} of {len(names)} adapters.")

    def _set(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        if not name:
            for option in _OPTIONS:
                print(f"  {option} {self._options.get(option, 'none')}")
            return
        if name not in _OPTIONS:
            raise ConfigError(f"there is no option {name!r}{near(name, list(_OPTIONS))}")
        options = {key: old for key, old in self._options.items() if key != name}
        if value.strip() != "none":
            options[name] = _parsed(name, value.strip())
        self._options = _valid(options)

    def _retry(self, _: str) -> None:
        if not self._messages:
            raise ConfigError("there is no output to generate again")
        message, output = self._messages[-2:]
        del self._messages[-2:]
        try:
            self.reply(message["content"])
        except LoraplexError:
            self._messages += [message, output]
            raise

    def _print_output(self, pieces: Iterator[OutputPiece], output: list[str]) -> None:
        """Print pieces as they come, and append their texts to `output`."""
        start, first, num_tokens = time.monotonic(), None, 0
        for piece in pieces:
            first = first or time.monotonic()
            num_tokens += piece.num_tokens
            output.append(piece.text)
            print(piece.text, end="", flush=True)
        print()
        if self._is_verbose and first is not None:
            seconds = time.monotonic() - start
            print(
                f"({num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s, first after "
                f"{first - start:.2f} s)",
                file=sys.stderr,
            )


def _valid(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options. Raises InvalidParameterError for a value out of its range."""
    SamplingParams(**options).validate()
    return dict(options)


def _parsed(name: str, value: str) -> Any:
    """Return the value of an option from its text. Raises ConfigError."""
    kind = _OPTIONS[name]
    if kind is str:
        return [value]
    try:
        return kind(value)
    except ValueError:
        expected = "an integer" if kind is int else "a number"
        raise ConfigError(f"{name} must be {expected} or none, got {value!r}") from None


_NO_MODEL = """give a model or a server:
  loraplex run demo                                   the tiny model in the package
  loraplex run Qwen/Qwen2.5-1.5B-Instruct             a model of the Hugging Face Hub
  loraplex run path/to/model --adapter zh=path/to/zh  a folder, with an adapter
  loraplex run http://127.0.0.1:8000                  a running server"""


@with_settings("dtype", "device", "quantization", "max_model_len", "chat_template")
def run(
    model: Annotated[
        str | None,
        typer.Argument(help="Hugging Face folder, hub id, demo, or http://HOST:PORT of a server."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="Adapter as NAME=PATH, or NAME of a server's; repeatable. The first is in use."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of new tokens (default: the model's length).")
    ] = None,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: Stop = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    api_key: Annotated[
        str | None,
        typer.Option(help="API key for the server (default: variable LORAPLEX_API_KEY)."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print the tokens per second of each output.")
    ] = False,
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Keep no file of the lines that you type.")
    ] = False,
    **settings: Any,
) -> None:
    """Chat with a model and its adapters in the terminal; /help lists the commands.

    Input from a pipe is one message, whose output is printed alone.
    """
    options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p if top_p != 1 else None,
        "top_k": top_k or None,
        "seed": seed,
        "stop": stop or None,
        "repetition_penalty": repetition_penalty if repetition_penalty != 1 else None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    with errors_to_exit_code(), contextlib.ExitStack() as stack:
        source, first = stack.enter_context(_source(model, adapter or [], api_key, settings))
        session = ChatSession(source, given, adapter=first, is_verbose=verbose)
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            text = sys.stdin.read()
            if not text.strip():
                raise ConfigError("standard input is empty: it is the message")
            session.reply(text)
            return
        history = None if no_history else state_directory("") / "chat_history"
        stack.enter_context(line_editing(session.completions, history))
        print("Type a message; /help lists the commands, /bye ends.")
        session.run()


@contextlib.contextmanager
def _source(
    model: str | None, adapters: list[str], api_key: str | None, settings: dict[str, Any]
) -> Iterator[tuple[ChatSource, str | None]]:
    """Yield the source, and the name of the adapter that is in use first. Raises ConfigError."""
    if model is None:
        raise ConfigError(_NO_MODEL)
    given = {name: value for name, value in settings.items() if value is not None}
    if model.startswith(("http://", "https://")):
        if given:
            flag = next(iter(given)).replace("_", "-")
            raise ConfigError(f"--{flag} is for a model in this process, and {model} is a server")
        if paths := [spec for spec in adapters if "=" in spec] or adapters[1:]:
            raise ConfigError(
                f"a server has its own adapters: give one name, not --adapter {paths[0]}"
            )
        yield ServerSource(ServerClient(model, api_key)), next(iter(adapters), None)
        return
    if api_key is not None:
        raise ConfigError(f"--api-key is for a server at http://HOST:PORT, and MODEL is {model}")
    folder, paths_by_name = with_demo(model, local_adapters(adapters))
    if sys.stderr.isatty():
        print(f"Loading {model} ...", file=sys.stderr)
    # torch takes seconds to import: a wrong flag must not wait for it.
    from loraplex.app.llm import LLM  # noqa: PLC0415

    with LLM(folder, paths_by_name, **given) as llm:
        yield LocalSource(llm), next(iter(paths_by_name), None)
