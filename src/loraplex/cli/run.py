"""`loraplex run`: chat in the terminal, with an engine in this process or with a server."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from loraplex.cli.chat_session import ChatSession
from loraplex.cli.chat_sources import ChatSource, LocalSource, ServerSource
from loraplex.cli.line_editor import history_file, line_editing
from loraplex.cli.options import errors_to_exit_code, local_adapters
from loraplex.cli.sampling_options import RepetitionPenalty, Seed, Stop, Temperature, TopK, TopP
from loraplex.cli.server_client import ServerClient
from loraplex.cli.settings_flags import with_settings
from loraplex.core.errors import ConfigError

_NO_MODEL = """give a model or a server:
  loraplex run Qwen/Qwen2.5-1.5B-Instruct             a model of the Hugging Face Hub
  loraplex run path/to/model --adapter zh=path/to/zh  a folder, with an adapter
  loraplex run http://127.0.0.1:8000                  a running server"""


@with_settings("dtype", "device", "quantization", "max_model_len", "chat_template")
def run(
    model: Annotated[
        str | None,
        typer.Argument(help="Hugging Face folder, hub id, or http://HOST:PORT of a server."),
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
        history = None if no_history else history_file()
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
    paths_by_name = local_adapters(adapters)
    if sys.stderr.isatty():
        print(f"Loading {model} ...", file=sys.stderr)
    # torch takes seconds to import: a wrong flag must not wait for it.
    from loraplex.app.llm import LLM  # noqa: PLC0415

    with LLM(model, paths_by_name, **given) as llm:
        yield LocalSource(llm), next(iter(paths_by_name), None)
