"""POST /classify: labels of texts."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.class_format import ClassFormat
from loraplex.core.errors import InvalidParameterError
from loraplex.core.output import RequestOutput
from loraplex.frontends.openai.adapter_fields import adapter_choices
from loraplex.frontends.openai.context import BY_HEADER, DIGESTS, TextContext, json_response
from loraplex.frontends.openai.convert import Prompt, prompts, rendered_chat
from loraplex.frontends.openai.pooled import (
    MAX_INPUTS,
    PooledUsage,
    Sent,
    body_truncation,
    check_texts,
    outputs_of,
    receive,
    usage_of,
)
from loraplex.frontends.openai.schema import ClassifyBody
from loraplex.frontends.openai.writers import adapter_headers
from loraplex.frontends.openapi.operation import ANY_ERROR, described, json_body, json_of
from loraplex.frontends.streams import done

_CHARACTERS_OF_BYTE = 5
"""Characters of a list of float32 numbers for each of their bytes."""


class ClassifyEntry(Struct, frozen=True, kw_only=True):
    index: int
    """Number of the text."""
    label: str
    """Name of the likeliest label."""
    probs: list[float]
    """Probabilities of all labels, or scores with `use_activation` false."""
    num_classes: int


class ClassifyList(Struct, frozen=True, kw_only=True):
    id: str
    created: int
    """Unix seconds."""
    model: str
    """Name of the request."""
    data: list[ClassifyEntry]
    usage: PooledUsage
    object: Literal["list"] = "list"


class ClassifyEndpoints:
    """POST /classify. A client that disconnects aborts its requests."""

    def __init__(self, context: TextContext) -> None:
        self._context = context

    @described(
        json_of(ClassifyList),
        tag="completions",
        body=json_body(ClassifyBody),
        headers=(BY_HEADER,),
        response_headers=(DIGESTS,),
        errors=ANY_ERROR,
    )
    async def classify(self, request: Request) -> Response:
        """Labels of texts, by the classification head of an adapter or of the base model."""
        sent, body = await receive(self._context, request, ClassifyBody)
        classes = sent.target.model.classes
        pool = classes.pool(activation=body.use_activation)
        texts, adds_special_tokens = await self._texts(sent, body)
        chosen = adapter_choices(body, sent.target, sent.origin.adapter, len(texts))
        requests = [
            replace(
                sent.request(adapters, body_truncation(body)),
                prompt=text,
                task=pool,
                add_special_tokens=adds_special_tokens,
            )
            for text, adapters in zip(texts, chosen, strict=True)
        ]
        field = "input" if body.messages is None else "messages"
        outputs = await outputs_of(self._context, sent, requests, {"prompt": field})
        num_characters = sum(len(output.pooled) for output in outputs) * _CHARACTERS_OF_BYTE
        response = await done(lambda: json_response(_written(sent, outputs)), num_characters)
        response.headers.update(adapter_headers(*outputs))
        return response

    async def _texts(self, sent: Sent, body: ClassifyBody) -> tuple[Sequence[Prompt], bool]:
        """Return the texts, and whether the tokenizer adds special tokens to them."""
        if (body.input is None) == (body.messages is None):
            raise InvalidParameterError("give either input or messages", param="input")
        if body.messages is None:
            if body.add_generation_prompt is not None or body.chat_template_kwargs is not None:
                raise InvalidParameterError(
                    "add_generation_prompt and chat_template_kwargs are for messages",
                    param="messages",
                )
            assert body.input is not None
            texts = prompts(body.input, MAX_INPUTS, "input")
            check_texts("input", texts)
            return texts, body.add_special_tokens is not False
        arguments = {
            "add_generation_prompt": bool(body.add_generation_prompt),
            "template_kwargs": body.chat_template_kwargs,
        }
        text = await rendered_chat(
            self._context.backend, sent.target.model, body.messages, arguments=arguments
        )
        return [text], body.add_special_tokens is True


def _written(sent: Sent, outputs: Sequence[RequestOutput]) -> ClassifyList:
    classes = sent.target.model.classes
    return ClassifyList(
        id=f"classify-{sent.id}",
        created=sent.created,
        model=sent.model,
        data=[_entry(index, output.pooled, classes) for index, output in enumerate(outputs)],
        usage=usage_of(outputs),
    )


def _entry(index: int, pooled: bytes, classes: ClassFormat) -> ClassifyEntry:
    values = np.frombuffer(pooled, "<f4")
    label = classes.labels_of(len(values))[int(values.argmax())]
    return ClassifyEntry(index=index, label=label, probs=values.tolist(), num_classes=len(values))
