"""Chat templates of a model: from the messages of a conversation to the text of its prompt.

Templates run in Jinja's immutable sandbox with the settings of transformers' apply_chat_template.
The sandbox guards values and attributes, not time or memory, so serving renders in a process that
may be killed (`local_texts`). Messages are data: no part of them is ever read as a template.
"""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from loraplex.core.errors import ConfigError, InvalidRequestError
from loraplex.serving.text.chat_messages import ROLES, normalize_messages
from loraplex.serving.text.chat_template_files import find_templates
from loraplex.serving.text.content_format import ContentFormat, content_format

MAX_SOURCE_CHARS = 2**18
MAX_RENDERED_CHARS = 2**24

NO_TEMPLATE = (
    "this model has no chat template; use /v1/completions with the whole prompt, or put a "
    "chat_template.jinja into the model's folder"
)

TOO_BIG = "the chat template takes too much memory for these messages"

_MAX_ERROR_CHARS = 2000

_RESERVED = (
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "tokenize"),
)
"""Variables that a client cannot set by chat_template_kwargs."""

# A template closes every message, so a last one that is not over gets a mark at its end, and the
# rendered text is cut where the mark stands.
_MARK: Final = "\ue000continue\ue001"
"""Mark of private characters, for which no template looks."""

_PROBE: Final = " "
"""Text after the mark: a template that strips white space would strip the message's own."""

_LOADERS = (nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)


def make_task(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function which renders one chat; both messages are arguments as JSON."""
    template = ChatTemplate(**json.loads(setup))

    def render(request: bytes) -> bytes:
        text = template.render(**json.loads(request))
        # Half of a surrogate pair is for the tokenizer to refuse, with its place in the text.
        return text.encode(errors="surrogatepass")

    return render


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
        self._environment = _environment(now, json_indent)
        self._special_tokens = dict(special_tokens or {})
        self._max_rendered_chars = max_rendered_chars
        self.text = "\n".join(templates.values())
        """Sources of all templates."""
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
        roles: Sequence[str] = ROLES,
    ) -> str:
        """The prompt; it already holds the special tokens.

        A `developer` message is given as a `system` one to a template that does not know that
        role. continue_final_message: the text ends where the last message does, which is not
        closed. omits_absent: a variable that is None is not defined at all. roles: of the
        messages. Raises InvalidRequestError: bad messages, no template, or the template's own
        refusal.
        """
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            only = ", ".join(self._templates)
            why = f"this model has no default chat template, only {only}" if only else NO_TEMPLATE
            raise InvalidRequestError(why, param="messages")
        normal = normalize_messages(messages, template.content, roles)
        if "developer" not in template.source:
            for message in normal:
                if message["role"] == "developer":
                    message["role"] = "system"
        if continue_final_message:
            normal = _with_mark(normal)
        given = template_kwargs or {}
        _check_variables(given, {"tools": tools or (), "documents": documents or ()})
        variables = {
            **self._special_tokens,
            **given,
            "messages": normal,
            "tools": None if tools is None else list(map(dict, tools)),
            "documents": None if documents is None else list(map(dict, documents)),
            "add_generation_prompt": add_generation_prompt,
        }
        if omits_absent:
            variables = {name: value for name, value in variables.items() if value is not None}
        text = self._render(template.code, variables)
        return _cut_at_mark(text) if continue_final_message else text

    def _compile(self, text: str, source: str) -> _Template:
        try:
            if len(text) > MAX_SOURCE_CHARS:
                raise ConfigError(f"{source} is not valid: more than {MAX_SOURCE_CHARS} characters")
            parsed = self._environment.parse(text)
            for loader in parsed.find_all(_LOADERS):
                name = type(loader).__name__
                raise jinja2.TemplateSyntaxError(f"{name} is not supported", loader.lineno)
            return _Template(text, self._environment.from_string(text), content_format(parsed))
        except (
            *(jinja2.TemplateError, SyntaxError, ValueError),
            *(RecursionError, MemoryError),
        ) as error:
            line = getattr(error, "lineno", None)
            place = "" if line is None else f", line {line}"
            raise ConfigError(f"{source} is not valid{place}: {error}") from error

    def _render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in template.generate(variables):
                num_chars += len(piece)
                if num_chars > self._max_rendered_chars:
                    raise InvalidRequestError(
                        "the chat template makes text of more than "
                        f"{self._max_rendered_chars} characters",
                        param="messages",
                    )
                pieces.append(piece)
        except InvalidRequestError:
            raise
        except MemoryError as error:
            raise InvalidRequestError(TOO_BIG, param="messages") from error
        except jinja2.TemplateError as error:
            reason = str(error.message)[:_MAX_ERROR_CHARS]
            raise InvalidRequestError(
                f"the chat template refuses these messages: {reason}", param="messages"
            ) from error
        except Exception as error:  # what its Python expressions may raise has no common class
            reason = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
            raise InvalidRequestError(
                f"the chat template failed on these messages: {reason}", param="messages"
            ) from error
        return "".join(pieces)


def _check_variables(
    kwargs: Mapping[str, Any], objects: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    """Raise InvalidRequestError for kwargs that are not the client's to set, and no objects."""
    for name in _RESERVED:
        if name in kwargs:
            raise InvalidRequestError(
                f"chat_template_kwargs.{name} cannot be set: the request itself determines it",
                param="chat_template_kwargs",
            )
    for name, values in objects.items():
        for index, value in enumerate(values):
            if not isinstance(value, Mapping):
                raise InvalidRequestError(
                    f"{name}[{index}] must be an object, not {type(value).__name__}", param=name
                )


def _environment(
    now: Callable[[], datetime.datetime], json_indent: int | None
) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    # Compiling must not run any of the template, because serving compiles it to validate it. Jinja
    # evaluates constant expressions unless it is not `optimized` and `finalize` takes the context.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        finalize=_unchanged,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
    )
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    environment.filters["tojson"] = _json_filter(json_indent)
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model wrote; only training needs it."""

    tags = {"generation"}  # noqa: RUF012 (read by Jinja under this name and type)

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@jinja2.pass_context
def _unchanged(_context: Any, value: Any) -> Any:
    return value


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _json_filter(default_indent: int | None) -> Callable[..., str]:
    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = default_indent,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Write JSON without the escapes of HTML that Jinja's own filter makes."""
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    return to_json


def _with_mark(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Normal messages, the last of which ends with the mark. Raises InvalidRequestError if it has
    no content to go on with."""
    *before, last = messages
    where = f"messages[{len(before)}]"
    content = last.get("content")
    if not content or not isinstance(content, str | list) or last.get("tool_calls"):
        raise InvalidRequestError(
            f"continue_final_message: {where} has no text to continue", param=f"{where}.content"
        )
    if any(_MARK in str(message.get("content")) for message in messages):
        raise InvalidRequestError(
            f"continue_final_message: a message holds {_MARK!r}, which is not for messages",
            param="messages",
        )
    return [*before, {**last, "content": _marked(content)}]


def _marked(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content + _MARK + _PROBE
    *parts, last = content
    return [*parts, {**last, "text": last["text"] + _MARK + _PROBE}]


def _cut_at_mark(text: str) -> str:
    """The rendered text up to the mark. Raises InvalidRequestError if the template has left the
    last message out."""
    before, mark, after = text.rpartition(_MARK)
    if not mark:
        raise InvalidRequestError(
            "continue_final_message: the chat template of this model does not write the last "
            "message as it is, so it cannot be continued",
            param="continue_final_message",
        )
    return before if after.startswith(_PROBE) else before.rstrip()
