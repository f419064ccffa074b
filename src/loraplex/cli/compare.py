"""`loraplex compare`: one prompt over adapters of a running server, the answers side by side."""

import json
import shutil
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from loraplex.cli.options import SERVER_URL, AsJson, Url, errors_to_exit_code, print_json
from loraplex.cli.server_client import ServerClient
from loraplex.core.errors import ConfigError

_NARROWEST = 26
"""Characters of a column; where there is no room for so many, answers stand below each other."""
_GAP = " | "


def compare(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME, repeatable: each answers beside the base model. Several at once are a JSON "
            'list: \'["a", {"name": "b", "scale": 0.5}]\'.'
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The base model [the first].")] = None,
    chat: Annotated[bool, typer.Option(help="The prompt is a user's message.")] = False,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of the draws of all answers.")] = None,
    url: Url = SERVER_URL,
    as_json: AsJson = False,
) -> None:
    """Ask a running server: one prompt, the base model and every adapter, side by side."""
    text = typer.get_text_stream("stdin").read() if prompt == "-" else prompt
    with errors_to_exit_code():
        body = {
            "model": model,
            "prompt": None if chat else text,
            "messages": [{"role": "user", "content": text}] if chat else None,
            "adapters": [None, *map(_entry, adapter or [])],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        comparison = ServerClient(url).post("/v1/compare", body)
    if as_json:
        print_json(comparison)
    else:
        for line in side_by_side(comparison["answers"], shutil.get_terminal_size().columns):
            print(line)
    if any(answer["error"] for answer in comparison["answers"]):
        raise typer.Exit(1)


def side_by_side(answers: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """Lines of at most `width` characters: name, text and figures of each answer."""
    column = (width + len(_GAP)) // len(answers) - len(_GAP)
    num_columns = len(answers) if column >= _NARROWEST else 1
    column = column if num_columns > 1 else width
    lines: list[str] = []
    for first in range(0, len(answers), num_columns):
        cells = [_sections(answer) for answer in answers[first : first + num_columns]]
        lines += [""] if lines else []
        for section in zip(*cells, strict=True):
            lines += _row([_wrapped(text, column) for text in section], column)
            lines.append(_GAP.join("-" * column for _ in section))
        lines.pop()
    return lines


def _entry(text: str) -> Any:
    """A name, or JSON where it begins like it."""
    if not text.startswith(("[", "{")):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--adapter {text!r} begins as JSON and is none: {error}") from error


def _sections(answer: Mapping[str, Any]) -> tuple[str, str, str]:
    name = _name(answer["asked"])
    if answer["error"]:
        return name, "", f"error: {answer['error']['message']}"
    figures = [
        f"{answer['num_tokens']} tokens, log probability {answer['logprob']:.3f}",
        f"first token {answer['ttft_ms']:.0f} ms, all {answer['total_ms']:.0f} ms",
    ]
    if answer["versus_base"]:
        figures.append(_difference(answer["versus_base"]))
    return name, answer["text"], "\n".join(figures)


def _name(asked: Any) -> str:
    """As it was asked for: `fr`, `0.7 fr + 0.3 legal`, `base`."""
    if asked is None or asked == []:
        return "base"
    if isinstance(asked, list):
        return " + ".join(map(_name, asked))
    if isinstance(asked, str):
        return asked
    name = next(str(asked[k]) for k in ("name", "task_id", "digest") if asked.get(k) is not None)
    scale = asked.get("scale")
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
    shown = ("below 20th" if v is None else f"{v:.2f}" for v in _logprobs(token))
    return f"({', '.join(shown)})"


def _logprobs(token: Mapping[str, Any]) -> tuple[float | None, float | None]:
    return token["logprob"], token["base_logprob"]


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of the text; a long word is cut, an empty line stays."""
    return [piece for line in text.splitlines() for piece in _wrapped_line(line, width)] or [""]


def _wrapped_line(line: str, width: int) -> list[str]:
    """textwrap counts characters; a Chinese one is as wide as two."""
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
    """In columns of a terminal."""
    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF")
        for char in text
    )
