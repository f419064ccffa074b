"""Checks with llguidance whether a grammar can be enforced; finds the place of a fault."""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from loraplex.core.errors import InvalidParameterError, RequestError, UnsupportedFeatureError
from loraplex.core.grammar import DEFAULT_LIMITS, Grammar, GrammarKind, GrammarLimits
from loraplex.core.tools import FunctionTool, ToolMode
from loraplex.serving.grammar.forms import (
    invalid,
    llguidance_form,
    message_form,
    parse_json,
    schema_form,
    unsupported,
)
from loraplex.serving.text.chat_format import read_completion_grammar
from loraplex.serving.text.tool_calls.format import arguments_schema

_IGNORED: Final = "Unimplemented keys"
_NOT_ENFORCED: Final = re.compile(rf"{_IGNORED}|Unknown format|not (fully )?supported\b")
"""Messages of llguidance of a valid grammar, of which a part is not implemented."""
_OPTIONS: Final = "x-guidance"
"""Keyword of llguidance's own options in a schema."""
_OLD_KEYWORDS: Final = ("extends", "disallow", "divisibleBy")
"""Constraints of draft 3 of JSON Schema that no later one has: llguidance takes them for
annotations."""
_ONE_OF: Final = (
    'the keyword "oneOf" is supported only for schemas of which a text cannot match two: use anyOf'
)
_OWN_WORDS: Final = {
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf "
    "with anyOf": _ONE_OF,
    "oneOf not fully supported, falling back to anyOf. This may cause validation errors in some "
    "cases.": _ONE_OF,
}
_MAX_FORCED_BYTES: Final = 16
"""Maximum length of a forced text: only its beginning matters."""
_MAX_LOOKS: Final = 200
"""Parts of a faulty schema that are looked at to find the fault."""
_LOOK_SECONDS: Final = 0.1
"""Limit of processor time for that: a large schema has many parts."""
_WRAPPED_REGEX: Final = re.compile(
    r"^at 1\(8\): invalid regex .*? \(in regex\): (.*?)(?:\n   1 \| start: .*)?$", re.DOTALL
)
_SCHEMA_KEYS: Final = (
    "items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_SCHEMA_LIST_KEYS: Final = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_SCHEMA_MAP_KEYS: Final = (
    "properties", "patternProperties", "$defs", "definitions", "dependentSchemas",
)  # fmt: skip

Path = tuple[str, ...]


class SpecialTokens:
    """The tokens of a model that a grammar may name, and single bytes for all the rest.

    The meaning of a grammar does not depend on how its text is tokenized, so the tokenizer is
    made at once.
    """

    def __init__(self, names: Mapping[int, bytes], vocab_size: int) -> None:
        """names: by id."""
        size = max(vocab_size, max(names, default=-1) + 1)
        free = [token_id for token_id in range(size + 256) if token_id not in names][:256]
        tokens = [b""] * (max(size, free[-1] + 1) + 1)
        for byte, token_id in enumerate(free):
            tokens[token_id] = bytes([byte])
        for token_id, name in names.items():
            tokens[token_id] = name
        self.id_of_byte = free
        self.is_tokenizer_wrapper = True  # this and what follows are llguidance's names
        self.eos_token_id = len(tokens) - 1
        self.bos_token_id = None
        self.special_token_ids = [*names, self.eos_token_id]
        tokens[self.eos_token_id] = b"<end of grammar>"
        self.tokens = tokens

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else bytes(text)
        return [self.id_of_byte[byte] for byte in data[:_MAX_FORCED_BYTES]]


class GrammarCheck:
    """Stateless but for a tokenizer. Threads may share it."""

    def __init__(
        self, special_tokens: SpecialTokens, limits: GrammarLimits = DEFAULT_LIMITS
    ) -> None:
        self._limits = LLParserLimits(verbose_errors=False, **msgspec.structs.asdict(limits))
        self._tokenizer = LLTokenizer(special_tokens, slices=[])  # type: ignore[arg-type]

    def compiled(self, grammar: Grammar) -> Grammar:
        """The grammar in llguidance's form, which the engine can match.

        Raises InvalidParameterError with the fault, and in a JSON schema with its place.
        """
        if grammar.kind is GrammarKind.MESSAGE:
            return self._compiled_message(grammar)
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            _refuse_old_keywords(grammar)
        return self._compiled(grammar, llguidance_form(grammar))

    def _compiled(self, grammar: Grammar, text: str, *, may_ignore: bool = False) -> Grammar:
        """may_ignore: whether a keyword that cannot be enforced may be left out."""
        error = self._error(text, may_ignore=may_ignore) or self._error_at_start(text)
        if error:
            raise self._described(grammar, error)
        return Grammar(GrammarKind.LLGUIDANCE, text)

    def _compiled_message(self, grammar: Grammar) -> Grammar:
        """Check the parts by themselves, so that an error names the part."""
        completion = read_completion_grammar(grammar.text)
        if completion.content is not None:
            self.compiled(completion.content)
        if completion.tool_use is not None:
            use = completion.tool_use
            is_required = use.mode is ToolMode.REQUIRED
            tools = tuple(self._enforceable(tool, is_required=is_required) for tool in use.tools)
            use = msgspec.structs.replace(use, tools=tools)
            completion = msgspec.structs.replace(completion, tool_use=use)
        return self._compiled(grammar, message_form(completion), may_ignore=True)

    def _enforceable(self, tool: FunctionTool, *, is_required: bool) -> FunctionTool:
        """Return the tool with the schema that a grammar keeps its calls to.

        Of a strict one that is all of its schema; of one that must be called, and is not strict,
        all but the keywords that no grammar can keep to; of any other nothing.
        """
        if not (tool.is_strict or is_required):
            return FunctionTool(name=tool.name)
        options = tool.parameters.get(_OPTIONS)
        lenient = {**(options if isinstance(options, dict) else {}), "lenient": True}
        if not tool.is_strict:
            parameters = {**tool.parameters, _OPTIONS: lenient}
            tool = msgspec.structs.replace(tool, parameters=parameters)
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(arguments_schema(tool)))
        try:
            if tool.is_strict:
                self.compiled(grammar)
            else:
                self._compiled(grammar, llguidance_form(grammar), may_ignore=True)
        except UnsupportedFeatureError as error:
            if not tool.is_strict:
                return FunctionTool(name=tool.name)
            raise _of_tool(tool, error) from error
        except InvalidParameterError as error:
            raise _of_tool(tool, error) from error
        return tool

    def _error(self, text: str, *, may_ignore: bool = False) -> str:
        """Empty if the grammar is well-formed and, unless it may, ignores nothing, even if a
        schema's own x-guidance requests it (lenient)."""
        is_error, messages = LLMatcher.validate_grammar_with_warnings(
            text, self._tokenizer, limits=self._limits
        )
        if is_error:
            return messages[0]
        ignored = [message for message in messages if _NOT_ENFORCED.search(message)]
        return "" if may_ignore else (ignored or [""])[0]

    def _error_at_start(self, text: str) -> str:
        """Some are well-formed and have no text at all, or are too large for a lexer."""
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        matcher.compute_bitmask()
        matcher.consume_tokens(matcher.compute_ff_tokens()[:1])
        matcher.compute_bitmask()
        if not matcher.is_error():
            return ""
        reason = matcher.get_error().partition("\n")[0]
        return "no text matches it" if "NoExtension" in reason or not reason else reason

    def _described(self, grammar: Grammar, error: str) -> RequestError:
        error = error.rstrip()
        refusal = unsupported if _NOT_ENFORCED.search(error) else invalid
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            schema = parse_json(grammar.kind, grammar.text)
            where = "/".join(("#", *self._find(schema, error)))
            return refusal(grammar.kind, f"at {where}: {_renamed(error)}")
        wrapped = _WRAPPED_REGEX.match(error)
        if wrapped is not None and grammar.kind in (GrammarKind.REGEX, GrammarKind.CHOICE):
            error = wrapped[1]
        return refusal(grammar.kind, _renamed(error))

    def _find(self, schema: Any, error: str) -> Path:
        """The innermost part of the schema that has this error by itself."""
        path: Path = ()
        num_looks = 0
        end = time.thread_time() + _LOOK_SECONDS
        while True:
            for step, part in _parts(schema):
                num_looks += 1
                if num_looks > _MAX_LOOKS or time.thread_time() > end:
                    return path
                if isinstance(part, dict) and self._error(schema_form(part)).rstrip() == error:
                    path, schema = (*path, *step), part
                    break
            else:
                return path


def _of_tool(tool: FunctionTool, error: RequestError) -> RequestError:
    message = f"the parameters of the function {tool.name!r}: {error.message}"
    return type(error)(message, param="tools")


def _refuse_old_keywords(grammar: Grammar) -> None:
    """Raise UnsupportedFeatureError for constraints that llguidance would ignore in silence."""
    waiting: list[tuple[Path, Any]] = [((), parse_json(grammar.kind, grammar.text))]
    while waiting:
        path, schema = waiting.pop()
        if not isinstance(schema, dict):
            continue
        old = [name for name in _OLD_KEYWORDS if name in schema]
        if schema.get("required") is True:
            old.append("required")
        if old:
            where = "/".join(("#", *path))
            error = f"at {where}: {_IGNORED}: {json.dumps(old)}"
            raise unsupported(grammar.kind, _renamed(error))
        waiting += [((*path, *step), part) for step, part in _parts(schema)]


def _parts(schema: Any) -> Iterator[tuple[Path, Any]]:
    """The schemas that a schema consists of, with the way to them."""
    for key in _SCHEMA_KEYS:
        if key in schema:
            yield (key,), schema[key]
    for key in _SCHEMA_LIST_KEYS:
        if isinstance(schema.get(key), list):
            for index, part in enumerate(schema[key]):
                yield (key, str(index)), part
    for key in _SCHEMA_MAP_KEYS:
        if isinstance(schema.get(key), dict):
            for name, part in schema[key].items():
                yield (key, name), part


def _renamed(error: str) -> str:
    """llguidance's words for a keyword that it does not know are about itself."""
    head, _, keys = error.partition(f"{_IGNORED}: ")
    if not keys:
        named = re.sub(r"\bUnknown format: (.*)", r'the format is not supported: "\1"', error)
        return _OWN_WORDS.get(error, named)
    listed, end, tail = keys.partition("]")
    names: Sequence[str] = json.loads(listed + end)
    plural = "keywords are" if len(names) > 1 else "keyword is"
    quoted = ", ".join(f'"{name}"' for name in names)
    return f"{head}the {plural} not supported: {quoted}{tail}"
