"""`loraplex compare`: outputs of several adapters of a running server, side by side."""

import json
import shutil
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from loraplex.cli.options import (
    SERVER_URL,
    AsJson,
    MaxTokens,
    Seed,
    Temperature,
    Url,
    errors_to_exit_code,
    near,
    print_json,
)
from loraplex.cli.server_client import ServerClient, quoted
from loraplex.core.errors import AdapterNotFoundError, ConfigError, LoraplexError

_NARROWEST = 26
"""Minimum width of a column; in a narrower terminal, outputs are printed below each other."""
_GAP = " | "


def compare(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="Adapter name, in addition to the base model; repeatable. Several adapters at "
            'once are a JSON list: \'["a", {"name": "b", "scale": 0.5}]\'.'
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Base model (default: the first).")] = None,
    chat: Annotated[bool, typer.Option(help="Send the prompt as a user's message.")] = False,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    url: Url = SERVER_URL,
    as_json: AsJson = False,
) -> None:
    """Compare the outputs of the base model and of adapters for one prompt, side by side."""
    text = typer.get_text_stream("stdin").read() if prompt == "-" else prompt
    with errors_to_exit_code():
        body = {
            "model": model,
            "prompt": None if chat else text,
            "messages": [{"role": "user", "content": text}] if chat else None,
            "adapters": [None, *map(_adapter, adapter or [])],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        client = ServerClient(url)
        _check_known(client, body)
        comparison = client.post("/v1/compare", body)
    if as_json:
        print_json(comparison)
    else:
        for line in side_by_side(comparison["answers"], shutil.get_terminal_size().columns):
            print(line)
    if any(entry["error"] for entry in comparison["answers"]):
        raise typer.Exit(1)


def _check_known(client: ServerClient, body: dict[str, Any]) -> None:
    """Raise AdapterNotFoundError, before any output is computed, for an unknown adapter.

    A server may find an adapter that it does not list, so it decides: a comparison of unknown
    adapters alone is refused without computing anything.
    """
    names = {name for adapter in body["adapters"] for name in _names(adapter)}
    unknown = sorted(name for name in names if not _is_listed(client, name))
    for name in unknown:
        try:
            client.post("/v1/compare", {**body, "adapters": [name], "max_tokens": 1})
        except AdapterNotFoundError as error:
            models = client.get("/v1/models")["data"]
            listed = [model["id"] for model in models if model["parent"]]
            raise AdapterNotFoundError(
                f"there is no adapter {name!r}{near(name, listed)}"
            ) from error


def _is_listed(client: ServerClient, name: str) -> bool:
    try:
        client.get(f"/v1/adapters/{quoted(name)}")
    except AdapterNotFoundError:
        return False
    except LoraplexError:  # for example a key without the right to look
        pass
    return True


def _names(adapter: Any) -> list[str]:
    """Return the names in a value of --adapter."""
    if isinstance(adapter, list):
        return [name for entry in adapter for name in _names(entry)]
    name = adapter.get("name") if isinstance(adapter, dict) else adapter
    return [name] if isinstance(name, str) else []


def side_by_side(entries: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """Return lines of at most `width` characters: name, text and figures of each entry."""
    column = (width + len(_GAP)) // len(entries) - len(_GAP)
    num_columns = len(entries) if column >= _NARROWEST else 1
    column = column if num_columns > 1 else width
    lines: list[str] = []
    for first in range(0, len(entries), num_columns):
        cells = [_sections(entry) for entry in entries[first : first + num_columns]]
        lines += [""] if lines else []
        for section in zip(*cells, strict=True):
            lines += _row([_wrapped(text, column) for text in section], column)
            lines.append(_GAP.join("-" * column for _ in section))
        lines.pop()
    return lines


def _adapter(text: str) -> Any:
    """Parse the value of --adapter: a name or JSON. Raises ConfigError."""
    if not text.startswith(("[", "{")):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--adapter {text!r} is not a name, and not JSON: {error}") from error


def _sections(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    name = _name(entry["asked"])
    if entry["error"]:
        return name, "", f"error: {entry['error']['message']}"
    figures = [
        f"{entry['num_tokens']} tokens, log probability {entry['logprob']:.3f}",
        f"first token {entry['ttft_ms']:.0f} ms, all {entry['total_ms']:.0f} ms",
    ]
    if entry["versus_base"]:
        figures.append(_difference(entry["versus_base"]))
    return name, entry["text"], "\n".join(figures)


def _name(adapter: Any) -> str:
    """Return the name of a requested adapter: `fr`, `0.7 fr + 0.3 legal`, `base`."""
    if adapter is None or adapter == []:
        return "base"
    if isinstance(adapter, list):
        return " + ".join(map(_name, adapter))
    if isinstance(adapter, str):
        return adapter
    keys = ("name", "task_id", "digest")
    name = next(str(adapter[key]) for key in keys if adapter.get(key) is not None)
    scale = adapter.get("scale")
    return name if scale is None else f"{scale:g} {name}"


def _difference(versus: Mapping[str, Any]) -> str:
    first = versus["first"]
    if first is None:
        return "the same tokens as the base"
    here, base = first["here"], first["base"]
    return (
        f"leaves the base at token {first['position']}: {here['token']!r} {_pair(here)}, not "
        f"{base['token']!r} {_pair(base)} (log probabilities here, base)"
    )


def _pair(token: Mapping[str, Any]) -> str:
    logprobs = token["logprob"], token["base_logprob"]
    shown = ("below 20th" if v is None else f"{v:.2f}" for v in logprobs)
    return f"({', '.join(shown)})"


def _wrapped(text: str, width: int) -> list[str]:
    """Wrap a text; a long word is cut, an empty line stays."""
    return [piece for line in text.splitlines() for piece in _wrapped_line(line, width)] or [""]


def _wrapped_line(line: str, width: int) -> list[str]:
    """Wrap one line by its width on a terminal (textwrap counts characters)."""
    pieces, current = [], ""
    for char in line:
        if _width(current + char) <= width:
            current += char
            continue
        head, _, tail = ("", "", "") if char == " " else current.rpartition(" ")
        pieces.append(head or current)
        current = f"{tail if head else ''}{char}".lstrip(" ")
    return [*pieces, current]


def _row(cells: Sequence[Sequence[str]], width: int) -> list[str]:
    height = max(map(len, cells))
    padded = [[*cell, *[""] * (height - len(cell))] for cell in cells]
    return [
        _GAP.join(part + " " * (width - _width(part)) for part in line).rstrip()
        for line in zip(*padded, strict=True)
    ]


def _width(text: str) -> int:
    """Return the number of a text's columns on a terminal: a Chinese character has two."""
    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF")
        for char in text
    )
