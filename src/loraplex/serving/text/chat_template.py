"""The prompt text of a conversation: finds a model folder's chat template and renders it.

The template language is what transformers' apply_chat_template gives a template: Jinja with
trim_blocks, lstrip_blocks, loop controls, `generation` blocks, `tojson`, `raise_exception` and
`strftime_now`. It knows nothing of tokenizing.

A template is code that came with a model, and runs in Jinja's immutable sandbox: no attribute of
Python's internals, nothing passed to it can be changed. Output, the sum of all `range`s, and the
strings and numbers made by `*`, `**` and `+` are bounded. Not covered: loops within loops over a
long conversation's own messages, a string that a template doubles again and again by `~`, and one
that it pads by a filter or by `%` to a huge width.
"""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from loraplex.core.errors import ConfigError, InvalidRequestError
from loraplex.serving.text.chat_messages import normalize_messages
from loraplex.text.special_tokens import read_json_object

MAX_RENDERED_CHARS = 2**24
MAX_RANGE_ITEMS = 100_000
"""Of all ranges of one rendering together."""
_MAX_NUMBER_BITS = 4096

_NO_TEMPLATE = (
    "this model has no chat template; use /v1/completions with the whole prompt, or put a "
    "chat_template.jinja into the model's folder"
)


class ChatTemplate:
    """The templates of one model: `default`, and perhaps `tool_use` for requests with tools.

    Immutable: any number of threads may render at once.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        source: str = "the chat template",
        max_rendered_chars: int = MAX_RENDERED_CHARS,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        """`special_tokens` are `bos_token` and the like; `now` is local time.

        Raises ConfigError if a template is not valid Jinja.
        """
        self._environment = _Environment(now)
        self._special_tokens = dict(special_tokens or {})
        self._max_rendered_chars = max_rendered_chars
        self._sources = dict(templates)
        self._templates = {
            name: self._compile(text, f"{source} ({name})") for name, text in templates.items()
        }

    @classmethod
    def load(
        cls, folder: Path | str, special_tokens: Mapping[str, str] | None = None
    ) -> "ChatTemplate":
        """The templates of a model folder; a folder without any gives one that refuses to render.

        chat_template.jinja (with additional_chat_templates/NAME.jinja) comes before
        chat_template.json, and that before tokenizer_config.json. Raises ConfigError.
        """
        return cls(_find(Path(folder)), special_tokens, source=f"the chat template of {folder}")

    @property
    def exists(self) -> bool:
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt; it already holds the special tokens.

        A `developer` message is given as a `system` one to a template that does not know that
        role. Raises InvalidRequestError: bad messages, no template, or the template's own refusal.
        """
        normal = normalize_messages(messages)
        name = self._choose(has_tools=bool(tools))
        if "developer" not in self._sources[name]:
            normal = [_developer_as_system(message) for message in normal]
        variables = {
            **self._special_tokens,
            **(template_kwargs or {}),
            "messages": normal,
            "tools": _objects("tools", tools),
            "documents": _objects("documents", documents),
            "add_generation_prompt": add_generation_prompt,
            "range": _BoundedRange(),
        }
        return self._render(self._templates[name], variables)

    def _choose(self, *, has_tools: bool) -> str:
        if not self._templates:
            raise InvalidRequestError(_NO_TEMPLATE, param="messages")
        if has_tools and "tool_use" in self._templates:
            return "tool_use"
        if "default" in self._templates:
            return "default"
        raise InvalidRequestError(
            f"this model has no default chat template, only {', '.join(self._templates)}",
            param="messages",
        )

    def _compile(self, text: str, source: str) -> jinja2.Template:
        try:
            return self._environment.from_string(text)
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateError) else ""
            raise ConfigError(f"{source} is not valid{line}: {error}") from error

    def _render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        room = self._max_rendered_chars
        try:
            for piece in template.generate(variables):
                # An empty piece counts, too, so that a loop ends even if it writes nothing.
                room -= max(len(piece), 1)
                if room < 0:
                    raise _too_large(f"text of more than {self._max_rendered_chars} characters")
                pieces.append(piece)
        except InvalidRequestError:
            raise
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"the chat template refuses these messages: {error.message}", param="messages"
            ) from error
        except Exception as error:  # what its Python expressions may raise has no common class
            raise InvalidRequestError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error
        return "".join(pieces)


def _find(folder: Path) -> dict[str, str]:
    templates = {
        path.stem: _read(path)
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if (folder / "chat_template.jinja").is_file():
        return templates | {"default": _read(folder / "chat_template.jinja")}
    for name in ("chat_template.json", "tokenizer_config.json"):
        section = read_json_object(folder / name).get("chat_template")
        if section:
            return templates | _named_templates(section, folder / name)
    return templates


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _named_templates(section: Any, path: Path) -> dict[str, str]:
    """One string, a list of {name, template}, or an object from name to template."""
    if isinstance(section, str):
        return {"default": section}
    try:
        pairs = (
            section.items()
            if isinstance(section, dict)
            else [(entry["name"], entry["template"]) for entry in section]
        )
        templates = {name: text for name, text in pairs if isinstance(text, str)}
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"chat_template in {path} must be a string or a list of objects with name and template"
        ) from error
    return templates


def _developer_as_system(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _objects(name: str, values: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    if values is None:
        return None
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise InvalidRequestError(
                f"{name}[{index}] must be an object, not {type(value).__name__}", param=name
            )
    return [dict(value) for value in values]


def _too_large(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"the chat template makes {what}", param="messages")


# ------------------------------------------------------------------ the template language


class _BoundedRange:
    """`range` for one rendering: all its ranges share one allowance."""

    def __init__(self) -> None:
        self._room = MAX_RANGE_ITEMS

    def __call__(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self._room -= len(numbers)
        if self._room < 0:
            raise _too_large(f"ranges of more than {MAX_RANGE_ITEMS} items")
        return numbers


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model wrote; only training needs it."""

    tags = {"generation"}  # noqa: RUF012 (read by Jinja under this name and type)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+"})

    def __init__(self, now: Callable[[], datetime.datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
        )
        del self.globals["lipsum"]
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if _result_size(operator, left, right) > MAX_RENDERED_CHARS:
            raise _too_large(f"a value that is too large by {operator!r}")
        return super().call_binop(context, operator, left, right)


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Characters, items, or for a power, bits: scaled so that one limit does for all."""
    match operator, left, right:
        case "**", int(), int() if right > 0:
            return left.bit_length() * right * (MAX_RENDERED_CHARS // _MAX_NUMBER_BITS)
        case ("*", str() | list() | tuple() as items, int(times)) | (
            "*",
            int(times),
            str() | list() | tuple() as items,
        ):
            return len(items) * times
        case ("+", str(), str()) | ("+", list(), list()):
            return len(left) + len(right)
    return 0


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML, which a prompt must not."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
