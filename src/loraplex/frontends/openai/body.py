"""Parsing of request bytes into a body of `schema`, or an error that a person can act on."""

import asyncio
import codecs
import contextlib
import json
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from loraplex.core.errors import (
    InvalidParameterError,
    InvalidRequestError,
    PayloadTooLargeError,
    RequestError,
)
from loraplex.frontends.access import headers_of
from loraplex.frontends.body_limits import DEFAULT_JSON_LIMITS, JsonLimits
from loraplex.frontends.openai.errors import joined
from loraplex.frontends.openai.schema import EXPECTED, JsonBody

MAX_SHOWN_CHARS = 60
DISCARD_SECONDS = 5.0

BodyT = TypeVar("BodyT", bound=JsonBody)

_EXPECTED_BY_ERROR_TYPE = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}

_KINDS = ((str, "a long string"), (list, "a list"), (dict, "an object"))


async def read_body(request: Request, max_bytes: int, max_discarded_bytes: int = 0) -> bytes:
    """Return the whole body. Raises PayloadTooLargeError, and keeps nothing, if it is too large.

    Raises InvalidRequestError for another type than JSON, because a foreign web page can post
    anything else without a preflight of the browser. max_discarded_bytes: see discard; at least
    max_bytes.
    """
    given = headers_of(request.scope).get("content-type", "")
    media_type = given.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise InvalidRequestError(
            f"the body must be sent as Content-Type: application/json, got {media_type or 'none'}"
        )
    num_bytes = declared_bytes(request)
    stream = request.stream()
    chunks: list[bytes] = []
    if num_bytes <= max_bytes:
        num_bytes = 0
        async for chunk in stream:
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                break
            chunks.append(chunk)
    if num_bytes > max_bytes:
        chunks.clear()
        await discard(request, stream, max(max_bytes, max_discarded_bytes))
        raise PayloadTooLargeError(
            f"the request body must not exceed {max_bytes} bytes (max_json_bytes)"
        )
    return b"".join(chunks)


def declared_bytes(request: Request) -> int:
    """Return the size that a request declares for its body; 0 without one.

    Raises InvalidRequestError for a body that is compressed.
    """
    encoding = headers_of(request.scope).get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise InvalidRequestError(
            f"the body must be sent as it is, without Content-Encoding; got {encoding[:60]}"
        )
    declared = headers_of(request.scope).get("content-length", "")
    return int(declared) if declared.isdecimal() else 0


async def discard(request: Request, stream: AsyncIterator[bytes], max_bytes: int) -> None:
    """Let an ordinary client finish, up to max_bytes more.

    A connection that is closed on unread bytes is reset, and most clients would then see the
    reset instead of the response. A client that sent Expect waits for the response itself.
    """
    if "expect" in headers_of(request.scope):
        return
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            async for chunk in stream:
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    return


def parse_body(schema: type[BodyT], body: bytes, limits: JsonLimits = DEFAULT_JSON_LIMITS) -> BodyT:
    """Raises InvalidRequestError if it is not a JSON object, InvalidParameterError for a field."""
    limits.check(body)
    if not body.strip():
        raise InvalidRequestError("the body is empty, so it is not valid JSON: send an object")
    if body.startswith(codecs.BOM_UTF8):
        raise InvalidRequestError(
            "the body begins with a byte order mark, so it is not valid JSON: send UTF-8 without"
        )
    try:
        parsed = schema.model_validate_json(body)
    except ValidationError as error:
        raise explain(error.errors(include_url=False), schema.expected) from None
    # What JSON parsers read in different ways: a name that an object has twice, a number that is
    # none. Nothing is kept of it.
    json.loads(body, object_pairs_hook=_object, parse_constant=_refuse_number, parse_float=_finite)
    return parsed


def validated(schema: type[BodyT], fields: Mapping[str, Any]) -> BodyT:
    """A body out of the fields of another one. Raises InvalidParameterError for a field."""
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise explain(error.errors(include_url=False), schema.expected) from None


def explain(details: Sequence[ErrorDetails], expected: Mapping[str, str]) -> RequestError:
    """A readable sentence for each field of which pydantic found something.

    expected: JsonBody.expected of the body.
    """
    by_field: dict[str, list[ErrorDetails]] = {}
    for each in details:
        by_field.setdefault(_name(_path(each["loc"])), []).append(each)
    return joined(
        [_explain_one(of_field, {**EXPECTED, **expected}) for of_field in by_field.values()]
    )


def _explain_one(details: Sequence[ErrorDetails], expected: Mapping[str, str]) -> RequestError:
    # A union reports an error for each of its branches.
    first = next((each for each in details if each["type"] == "too_long"), details[0])
    if first["type"] == "json_invalid":
        return InvalidRequestError(f"the body is not valid JSON: {first['ctx']['error']}")
    path = _path(first["loc"])
    if not path:
        return InvalidRequestError(f"the body must be a JSON object, got {_show(first['input'])}")
    name = _name(path)
    if first["type"] == "missing":
        return InvalidParameterError(f"{name} is required", param=name)
    if first["type"] == "too_long":
        maximum = first["ctx"]["max_length"]
        return InvalidParameterError(
            f"{name} has too many elements; at most {maximum} are allowed", param=name
        )
    return InvalidParameterError(
        f"{name} must be {_expected(path, first, expected)}, got {_show(first['input'])}",
        param=name,
    )


def _path(loc: Sequence[int | str]) -> list[int | str]:
    """Where the field is: up to pydantic's name for a branch of a union (`str`, `list[int]`)."""
    is_branch = [isinstance(p, str) and (p in ("str", "bool") or "[" in p) for p in loc]
    return list(loc[: is_branch.index(True)] if True in is_branch else loc)


def _name(path: Iterable[int | str]) -> str:
    """Name as in JavaScript: `messages[0].content`; an empty part stands for any index."""
    parts = (f".{p}" if isinstance(p, str) and p else f"[{p}]" for p in path)
    return "".join(parts).removeprefix(".")


def _expected(path: Sequence[int | str], details: ErrorDetails, expected: Mapping[str, str]) -> str:
    field = _name("" if isinstance(part, int) else part for part in path)
    if field in expected:
        return expected[field]
    if details["type"] == "literal_error":
        return str(details["ctx"]["expected"])
    return _EXPECTED_BY_ERROR_TYPE.get(details["type"], "of another type")


def _show(value: Any) -> str:
    """The value as JSON, or its kind if it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if len(text) <= MAX_SHOWN_CHARS:
        return text
    return next((name for kind, name in _KINDS if isinstance(value, kind)), "a value")


def _object(pairs: Sequence[tuple[str, Any]]) -> None:
    """Raise InvalidRequestError for a name that the object has twice."""
    names = {name for name, _ in pairs}
    if len(names) == len(pairs):
        return
    seen = set()
    for name, _ in pairs:
        if name in seen:
            raise InvalidRequestError(
                f"the body has the field {name[:60]!r} twice in one object", param=name[:60]
            )
        seen.add(name)


def _finite(text: str) -> None:
    if not math.isfinite(float(text)):
        _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise InvalidRequestError(
        f"the body has {text[:60]}, which is not a number of JSON or of a float"
    )
