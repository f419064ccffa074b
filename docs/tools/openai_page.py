"""docs/fields-openai.md: what OpenAI's clients, and those of vLLM, SGLang, LoRAX and llgtrt, may
send to the routes that generate, and what is done with it.
"""

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from loraplex.core.support import Feature, Section, Support
from loraplex.frontends.openai import openai_routes
from loraplex.frontends.openai.absent_routes import ABSENT
from loraplex.frontends.openai.adapter_fields import ADAPTER_HEADER
from loraplex.frontends.openai.lorax.endpoints import REFUSED as LORAX_REFUSED
from loraplex.frontends.openai.lorax.schema import Parameters
from loraplex.frontends.openai.pooled import REFUSED as POOLED_REFUSED
from loraplex.frontends.openai.responses_api import refusals as of_responses
from loraplex.frontends.openai.responses_api.schema import ResponsesBody
from loraplex.frontends.openai.schema import (
    ChatBody,
    ClassifyBody,
    CohereEmbedBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    JsonBody,
    PooledBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    StreamOptions,
    TeiEmbedBody,
    TeiPredictBody,
    TokenizeBody,
)
from loraplex.frontends.openai.unsupported import REFUSED, WITHOUT_EFFECT
from loraplex.frontends.structured_outputs import SERVED_FIELDS
from support.echo_service import EchoService
from tools import openai_names as names
from tools.markdown import page

_ABOUT = """\
This page is written by `make tables` from the schema that reads requests; a test compares it, and
compares its names with those of the `openai` package.

**works**: the field has the meaning of the original system, or the meaning in the note. **accepted
without effect**: any value is accepted and changes nothing. **refused**: 400 with the code
`unsupported_feature`, unless the value has no effect (null, empty, false). Other fields are
refused with the nearest name, unless the setting `unknown_fields` is `ignore`. Values and
limits are in [Request options](options.md), errors in [OpenAI errors](errors-openai.md)."""

_STREAM_OPTIONS = "stream_options."
_CONVERTER = re.compile(r":\w+}")
_IMAGES = "only text is served"


def sections() -> Iterator[Section]:
    """Raises KeyError for a name that nothing is known of."""
    yield _section("OpenAI: completions", CompletionBody, names.OPENAI_COMPLETIONS)
    yield _section(
        "OpenAI: chat completions",
        ChatBody,
        (*names.OPENAI_CHAT, *names.OPENAI_STREAM_OPTIONS),
        "`stream_options` are the same in completions.",
    )
    yield _messages()
    yield Section(
        "Embeddings",
        tuple(
            msgspec.structs.replace(
                feature(EmbeddingBody, name), is_ours=name not in names.OPENAI_EMBEDDINGS
            )
            for name in EmbeddingBody.model_fields
        ),
        "Of `POST /v1/embeddings`; more in [Embeddings](embeddings.md).",
    )
    for title, body, about in _POOLED:
        fields = tuple(
            feature(body, name) for name in body.model_fields if name not in PooledBody.model_fields
        )
        refused = tuple(
            Feature(row.field, Support.REFUSED, row.advice)
            for row in POOLED_REFUSED.values()
            if row.field not in body.model_fields
        )
        yield Section(title, (*fields, *refused), about)
    yield Section(
        "Classification",
        tuple(
            msgspec.structs.replace(
                feature(ClassifyBody, name), is_ours=name not in names.VLLM_CLASSIFY
            )
            for name in ClassifyBody.model_fields
        ),
        "Of `POST /classify` and `POST /v1/classify`; more in [Classification](classification.md).",
    )
    yield Section(
        "OpenAI: responses",
        tuple(responses_feature(name) for name in names.OPENAI_RESPONSES),
        "More in [Responses](responses.md).",
    )
    yield Section("Items of a response's input", _ITEMS)
    yield _section("vLLM: completions and chat", CompletionBody, names.VLLM)
    yield _section("vLLM: completions", CompletionBody, names.VLLM_COMPLETIONS)
    yield _section("vLLM: chat", ChatBody, names.VLLM_CHAT)
    yield _structured_outputs()
    yield _section("vLLM: /tokenize", TokenizeBody, names.VLLM_TOKENIZE)
    yield _section("vLLM: /detokenize", DetokenizeBody, names.VLLM_DETOKENIZE)
    yield _section("SGLang: completions and chat", CompletionBody, names.SGLANG)
    yield _section("SGLang: completions", CompletionBody, names.SGLANG_COMPLETIONS)
    yield _section("SGLang: chat", ChatBody, names.SGLANG_CHAT)
    yield _section(
        "LoRAX: completions and chat",
        CompletionBody,
        names.LORAX,
        "And its `response_format`: json_object with a schema.",
    )
    yield Section(
        "LoRAX: parameters of /generate, /generate_stream and /",
        tuple(_lorax(name) for name in names.LORAX_PARAMETERS),
        "Further fields: `inputs` and, in /, `stream`. A wrong field is 422, as there.",
    )
    yield _section("llama.cpp and Ollama: completions and chat", CompletionBody, names.LLAMA_CPP)
    yield _section("Codex: completions and chat", CompletionBody, names.CODEX)
    yield _section("llgtrt: completions and chat", CompletionBody, names.LLGTRT)
    yield _section("llgtrt: chat", ChatBody, names.LLGTRT_CHAT)
    yield Section("loraplex: completions and chat", tuple(_own()))
    yield Section("Headers", _HEADERS)
    yield Section("Routes", tuple(_routes()))
    yield Section("Routes that are not served", tuple(route.feature for route in ABSENT))


def openai_page() -> str:
    return page("OpenAI: what is supported", _ABOUT, sections())


def feature(body: type[JsonBody], name: str) -> Feature:
    """The row of a field. Raises KeyError if the schema does not have it, nor `unsupported`."""
    if name in _NO_EFFECT:
        return _NO_EFFECT[name]
    fields, of_schema = body.model_fields, name
    if name.startswith(_STREAM_OPTIONS):
        fields, of_schema = StreamOptions.model_fields, name.removeprefix(_STREAM_OPTIONS)
    if of_schema in fields:
        note = " ".join((fields[of_schema].description or "").split())
        return Feature(name, Support.WORKS, note.removesuffix("."))
    return _REFUSED[name]


def responses_feature(name: str) -> Feature:
    """Return the feature of a field of /v1/responses."""
    if name in ResponsesBody.model_fields:
        note = " ".join((ResponsesBody.model_fields[name].description or "").split())
        return Feature(name, Support.WORKS, note.removesuffix("."))
    no_effect = {row.name: row for row in of_responses.WITHOUT_EFFECT}
    if name in no_effect:
        return no_effect[name]
    row = of_responses.BY_FIELD[name]
    return Feature(name, Support.REFUSED, row.advice)


_SHARED = f"And as in embeddings: {', '.join(f'`{name}`' for name in PooledBody.model_fields)}."
_POOLED: Final = (
    ("vLLM and SGLang: /score", ScoreBody, _SHARED),
    ("vLLM, Jina, Cohere and TEI: /rerank", RerankBody, _SHARED),
    ("vLLM: /pooling", PoolingBody, "Further fields: those of embeddings."),
    ("Cohere: /v2/embed", CohereEmbedBody, _SHARED),
    ("TEI: /embed", TeiEmbedBody, _SHARED),
    ("TEI: /predict", TeiPredictBody, _SHARED),
)

_NO_EFFECT = {row.name: row for row in WITHOUT_EFFECT}
_REFUSED = {row.field: Feature(row.field, Support.REFUSED, row.advice) for row in REFUSED}

_HEADERS = (
    Feature("Authorization", note="`Bearer KEY`, where the server has API keys"),
    Feature("x-request-id", note="the id of the response and in the server's log; returned"),
    Feature(ADAPTER_HEADER, note="an adapter of the base model, as lora_model", is_ours=True),
    Feature("Content-Type", note="application/json, and nothing else"),
    Feature("Content-Encoding", Support.REFUSED, "a body is sent as it is"),
    Feature("OpenAI-Organization", Support.NO_EFFECT, "tenants are distinguished by their keys"),
    Feature("OpenAI-Project", Support.NO_EFFECT, "tenants are distinguished by their keys"),
)

_ITEMS = (
    Feature("message", note="of the roles user, system, developer, assistant"),
    Feature("content part input_text, output_text"),
    Feature("content part refusal", note="of an assistant message; it is text"),
    *(
        Feature(f"content part {kind}", Support.REFUSED, _IMAGES)
        for kind in ("input_image", "input_file", "input_audio")
    ),
    Feature("function_call"),
    Feature("function_call_output", note="a text, or a list of text parts"),
    Feature("reasoning", note="its text is for the template, as reasoning_content"),
    Feature("item_reference", Support.REFUSED, "use previous_response_id, or send the item"),
    Feature(
        "calls of tools that OpenAI runs, and their outputs",
        Support.REFUSED,
        "only functions are served",
    ),
)


def _section(title: str, body: type[JsonBody], fields: names.Names, about: str = "") -> Section:
    return Section(title, tuple(feature(body, name) for name in fields), about)


def _lorax(name: str) -> Feature:
    if name in LORAX_REFUSED:
        return Feature(name, Support.REFUSED, LORAX_REFUSED[name])
    return feature(Parameters, name)


def _messages() -> Section:
    rows = (
        Feature("role", note="system, developer, user, assistant, tool"),
        Feature("content", note="a text, or a list of parts"),
        Feature("content part text"),
        *(
            Feature(f"content part {kind}", Support.REFUSED, _IMAGES)
            for kind in ("image_url", "input_audio", "file", "video_url", "audio_url")
        ),
        Feature("name", note="for the template"),
        Feature(
            "tool_calls",
            note="of an assistant message; an empty list is as absent, and arguments that are no "
            "JSON object are `{}`",
        ),
        Feature("tool_call_id", note="of a tool message"),
        Feature("reasoning_content", note="for the template; as thinking or reasoning, too"),
    )
    return Section("Messages of a chat", rows, "Any other field of a message is for the template.")


def _structured_outputs() -> Section:
    rows = (
        Feature(name, Support.WORKS if name in SERVED_FIELDS else Support.REFUSED)
        for name in names.VLLM_STRUCTURED_OUTPUTS
    )
    return Section("vLLM: structured_outputs", tuple(rows), "One of them; false is neutral.")


def _own() -> Iterator[Feature]:
    """What is in the schema and on no list."""
    listed = {
        name
        for attribute in vars(names)
        if attribute.isupper()
        for name in getattr(names, attribute)
    }
    for body in (CompletionBody, ChatBody):
        for name in body.model_fields:
            if name not in listed:
                listed.add(name)
                row = feature(body, name)
                yield Feature(row.name, row.support, row.note, is_ours=True)


def _routes() -> Iterator[Feature]:
    for route in openai_routes(EchoService()):
        if route.include_in_schema:
            for method in sorted((route.methods or set()) - {"HEAD"}):
                yield Feature(f"{method} {_CONVERTER.sub('}', route.path)}")
