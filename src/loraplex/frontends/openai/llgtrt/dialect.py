"""llgtrt's way to read a request: any `model` is the one that is served, `lora_model` selects."""

import datetime
from pathlib import PurePath
from typing import Any, Final

from starlette.requests import Request

from loraplex.core.errors import InvalidParameterError, ModelNotFoundError, cut
from loraplex.core.principal import Principal
from loraplex.frontends.openai.adapter_fields import ModelTarget
from loraplex.frontends.openai.context import ApiDialect, GenerationT, ReadBody, TextContext
from loraplex.frontends.openai.schema import ChatBody, GenerationBody

MIN_TOKENS: Final = 1
"""Default minimum length: an empty output is not intended."""
DEFAULT_MAX_TOKENS: Final = 16


class LlgtrtDialect(ApiDialect):
    """Where llgtrt's own way is a defect, ours stands; see `differences`."""

    shows_schema = True

    def __init__(self, *, has_lora_root: bool, json_start_token: str = "") -> None:
        """json_start_token: the special token before a tool call."""
        self._has_lora_root = has_lora_root
        self.json_start_token = json_start_token

    def reader(self, context: TextContext) -> ReadBody:
        async def read(request: Request, schema: type[GenerationT]) -> GenerationT:
            body = await self.parse(context, request, schema)
            return body.model_copy(update=self.changes(body))

        return read

    async def parse(
        self, context: TextContext, request: Request, schema: type[GenerationT]
    ) -> GenerationT:
        """Read the body as it was sent."""
        return await context.parse(request, schema)

    def changes(self, body: GenerationBody) -> dict[str, Any]:
        """Return what the fields become. Raises InvalidParameterError."""
        if not isinstance(body, ChatBody):
            return _changes(body)
        check_tools(body)
        # A template that writes no BOS gets one.
        add_bos = True if body.add_special_tokens is None else body.add_special_tokens
        return _changes(body) | {"add_special_tokens": add_bos}

    async def target(
        self, context: TextContext, body: GenerationBody, principal: Principal
    ) -> ModelTarget:
        if body.lora_model:
            await self._check_name(context, body.lora_model, principal)
        return await context.target(None, principal)

    def rendering(self, body: ChatBody) -> dict[str, Any]:
        arguments = super().rendering(body)
        variables = {"date_string": _today(), **(arguments["template_kwargs"] or {})}
        return arguments | {"template_kwargs": variables, "omits_absent": True}

    async def _check_name(self, context: TextContext, name: str, principal: Principal) -> None:
        path = PurePath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            raise InvalidParameterError(
                f"LoRA weights path {name!r} is outside the LoRA base directory",
                param="lora_model",
            )
        if self._has_lora_root:
            return
        try:
            await context.backend.find(name, principal)
        except ModelNotFoundError:
            raise InvalidParameterError(
                f"lora_model specified but lora_root not set: there is no adapter {cut(name)!r}, "
                "and the server was started without --lora-root",
                param="lora_model",
            ) from None


def check_tools(body: ChatBody) -> None:
    """Raise InvalidParameterError if tools and a format both constrain the output."""
    kind = (body.response_format or {}).get("type", "text")
    if body.tools and kind != "text":
        raise InvalidParameterError(
            "response_format cannot be specified together with tools", param="response_format"
        )


def _changes(body: GenerationBody) -> dict[str, Any]:
    """What llgtrt takes for a field that is absent, and its meaning of `strict`."""
    changes: dict[str, Any] = {}
    if body.min_tokens is None and body.max_tokens != 0:
        changes["min_tokens"] = MIN_TOKENS
    inner = (body.response_format or {}).get("json_schema")
    is_schema = (body.response_format or {}).get("type") == "json_schema"
    if body.response_format is None or not is_schema or not isinstance(inner, dict):
        return changes
    if inner.get("strict") is not True:
        # The template still sees the schema, which is under its own key.
        changes["response_format"] = {**body.response_format, "type": "json_object"}
    elif inner.get("schema") is None:
        raise InvalidParameterError(
            "missing schema in strict mode: response_format.json_schema has strict, but no schema",
            param="response_format",
        )
    return changes


def _today() -> str:
    """Date in the form of its templates: ` 2 November 2026`."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now.day:2d} {now:%B %Y}"
