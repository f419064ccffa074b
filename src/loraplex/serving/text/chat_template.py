"""The prompt text of a conversation: renders a model's chat template.

The language, and what keeps a hostile template from taking time or memory, is `template_language`.
It knows nothing of tokenizing. Messages are data: nothing of them is ever read as a template.
"""

import datetime
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.nodes
import msgspec

from loraplex.core.errors import ConfigError, InvalidRequestError
from loraplex.serving.text.chat_messages import normalize_messages
from loraplex.serving.text.chat_template_files import find_templates
from loraplex.serving.text.content_format import ContentFormat, content_format
from loraplex.serving.text.continued_message import cut_at_mark, with_mark
from loraplex.serving.text.template_language import BoundedRange, TemplateEnvironment
from loraplex.serving.text.template_meter import Meter, metered, too_large

MAX_RENDERED_CHARS = 2**24

_NO_TEMPLATE = (
    "this model has no chat template; use /v1/completions with the whole prompt, or put a "
    "chat_template.jinja into the model's folder"
)

_OF_THE_REQUEST = (
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "tokenize", "range"),
)
"""Variables that a client does not set by chat_template_kwargs."""


class _Template(msgspec.Struct, frozen=True):
    source: str
    code: jinja2.Template
    content: ContentFormat


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
        json_indent: int | None = None,
    ) -> None:
        """`special_tokens` are `bos_token` and the like; `now` is local time; json_indent is that
        of `tojson` where a template gives none.

        Raises ConfigError if a template is not valid Jinja, or needs what is not served.
        """
        self._environment = TemplateEnvironment(now, json_indent)
        self._special_tokens = dict(special_tokens or {})
        self._max_rendered_chars = max_rendered_chars
        self.text = "\n".join(templates.values())
        """Of all of them."""
        self._templates = {
            name: self._compile(text, f"{source} ({name})") for name, text in templates.items()
        }

    @classmethod
    def load(
        cls, folder: Path | str, special_tokens: Mapping[str, str] | None = None
    ) -> "ChatTemplate":
        """The templates of a model folder; a folder without any gives one that refuses to render.

        Raises ConfigError.
        """
        templates = find_templates(Path(folder))
        return cls(templates, special_tokens, source=f"the chat template of {folder}")

    @property
    def exists(self) -> bool:
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        omits_absent: bool = False,
    ) -> str:
        """The prompt; it already holds the special tokens.

        A `developer` message is given as a `system` one to a template that does not know that
        role. continue_final_message: the text ends where the last message does, which is not
        closed. omits_absent: a variable that is None is not defined at all. Raises
        InvalidRequestError: bad messages, no template, or the template's own refusal.
        """
        template = self._choose(has_tools=bool(tools))
        normal = normalize_messages(messages, template.content)
        if "developer" not in template.source:
            normal = [_developer_as_system(message) for message in normal]
        if continue_final_message:
            normal = with_mark(normal)
        variables = {
            **self._special_tokens,
            **_checked_kwargs(template_kwargs or {}),
            "messages": normal,
            "tools": _objects("tools", tools),
            "documents": _objects("documents", documents),
            "add_generation_prompt": add_generation_prompt,
            "range": BoundedRange(),
        }
        if omits_absent:
            variables = {name: value for name, value in variables.items() if value is not None}
        text = self._render(template.code, variables)
        return cut_at_mark(text) if continue_final_message else text

    def _choose(self, *, has_tools: bool) -> _Template:
        if not self._templates:
            raise InvalidRequestError(_NO_TEMPLATE, param="messages")
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        raise InvalidRequestError(
            f"this model has no default chat template, only {', '.join(self._templates)}",
            param="messages",
        )

    def _compile(self, text: str, source: str) -> _Template:
        try:
            with metered(Meter()):
                code = self._environment.template(text)
                parsed = self._environment.parse(text)
            return _Template(text, code, content_format(parsed))
        except (
            *(jinja2.TemplateError, InvalidRequestError, SyntaxError, ValueError),
            *(RecursionError, MemoryError),
        ) as error:
            line = getattr(error, "lineno", None)
            place = "" if line is None else f", line {line}"
            raise ConfigError(f"{source} is not valid{place}: {error}") from error

    def _render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        room = self._max_rendered_chars
        try:
            with metered(Meter(len(variables["messages"]))):
                for piece in template.generate(variables):
                    # An empty piece counts, too, so that a loop ends even if it writes nothing.
                    room -= max(len(piece), 1)
                    if room < 0:
                        raise too_large(f"text of more than {self._max_rendered_chars} characters")
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


def _developer_as_system(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _checked_kwargs(values: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in _OF_THE_REQUEST:
        if name in values:
            raise InvalidRequestError(
                f"chat_template_kwargs.{name} cannot be set: it is what the request itself says",
                param="chat_template_kwargs",
            )
    return values


def _objects(name: str, values: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    if values is None:
        return None
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise InvalidRequestError(
                f"{name}[{index}] must be an object, not {type(value).__name__}", param=name
            )
    return [dict(value) for value in values]
