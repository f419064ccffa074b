"""Vectors of texts, in the forms of OpenAI, vLLM's /pooling, Text Embeddings Inference and Cohere;
and labels of texts in TEI's form.
"""

import base64
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.errors import InvalidParameterError, UnsupportedFeatureError, brief
from loraplex.core.output import RequestOutput
from loraplex.core.request import Prefix, PromptTruncation, TruncationSide
from loraplex.core.score_format import ScoreKind
from loraplex.core.task import Pool, PoolKind
from loraplex.core.version import __version__
from loraplex.frontends.field_names import named_as_sent
from loraplex.frontends.openai.adapter_fields import adapter_choices
from loraplex.frontends.openai.context import BY_HEADER, DIGESTS, TextContext, json_response
from loraplex.frontends.openai.convert import Prompt, prompts
from loraplex.frontends.openai.pooled import (
    MAX_INPUTS,
    PooledUsage,
    Sent,
    agreed,
    body_truncation,
    check_texts,
    outputs_of,
    receive,
    usage_of,
)
from loraplex.frontends.openai.schema import (
    CohereEmbedBody,
    EmbeddingBody,
    PoolingBody,
    TeiEmbedBody,
    TeiPredictBody,
)
from loraplex.frontends.openai.writers import adapter_headers
from loraplex.frontends.openapi.operation import (
    ANY_ERROR,
    described,
    json_body,
    json_of,
    json_of_any,
)
from loraplex.frontends.streams import done
from loraplex.serving.backend import ModelCard
from loraplex.serving.scoring import DOCUMENT_PROMPTS, QUERY_PROMPTS

_CHARACTERS_OF_BYTE: Final = 5
"""Characters of a list of float32 numbers for each of their bytes."""
_COHERE_API: Final = "2"

Values = list[float] | str
"""Numbers; or as base64 the text of their bytes: float32, little-endian."""
Array = npt.NDArray[np.float32]


class EmbeddingEntry(Struct, frozen=True, kw_only=True):
    index: int
    """Number of the text."""
    embedding: Values
    """Numbers; with `base64` the text of their bytes: float32, little-endian."""
    object: Literal["embedding"] = "embedding"


class EmbeddingList(Struct, frozen=True, kw_only=True):
    data: list[EmbeddingEntry]
    model: str
    """Name of the request."""
    usage: PooledUsage
    object: Literal["list"] = "list"


class PoolingEntry(Struct, frozen=True, kw_only=True):
    index: int
    data: Values
    object: Literal["pooling"] = "pooling"


class PoolingList(Struct, frozen=True, kw_only=True):
    id: str
    created: int
    """Unix seconds."""
    model: str
    data: list[PoolingEntry]
    usage: PooledUsage
    object: Literal["list"] = "list"


class CohereVersion(Struct, frozen=True):
    version: str = _COHERE_API


class CohereTokens(Struct, frozen=True):
    input_tokens: int


class CohereMeta(Struct, frozen=True):
    """What Cohere reports of a request."""

    tokens: CohereTokens
    billed_units: CohereTokens
    api_version: CohereVersion = CohereVersion()

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> "CohereMeta":
        tokens = CohereTokens(usage_of(outputs).prompt_tokens)
        return cls(tokens, tokens)


class CohereEmbeddings(Struct, frozen=True, rename={"numbers": "float"}):
    """Vectors by type; those that were not requested are left out."""

    numbers: list[list[float]] | msgspec.UnsetType = msgspec.UNSET
    base64: list[str] | msgspec.UnsetType = msgspec.UNSET
    binary: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    """-128 to 127: `ubinary` minus 128."""
    ubinary: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    """Eight signs in a byte, the first one the highest bit: 1 is a value above 0."""


class CohereEmbedding(Struct, frozen=True, kw_only=True):
    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: CohereMeta
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"


class TeiPrediction(Struct, frozen=True):
    label: str
    score: float


class TeiPooling(Struct, frozen=True):
    pooling: str


class TeiLabels(Struct, frozen=True):
    id2label: dict[str, str]
    label2id: dict[str, int]

    @classmethod
    def of(cls, labels: Sequence[str]) -> "TeiLabels":
        ids = {label: index for index, label in enumerate(labels)}
        return cls({str(index): label for label, index in ids.items()}, ids)


class TeiModelType(Struct, frozen=True, omit_defaults=True):
    """What a model is for, in the one field that is set."""

    embedding: TeiPooling | None = None
    classifier: TeiLabels | None = None
    reranker: TeiLabels | None = None

    @classmethod
    def of(cls, card: ModelCard) -> "TeiModelType":
        """A model that scores pairs by a judgement or by one label is a reranker."""
        num_labels = card.classes.num_labels
        labels = TeiLabels.of(card.classes.labels_of(num_labels))
        if num_labels > 1:
            return cls(classifier=labels)
        if not card.scores.problem and card.scores.kind is not ScoreKind.VECTORS:
            return cls(reranker=labels)
        kind = card.vectors.kind
        return cls(embedding=TeiPooling(_TEI_POOLING.get(kind, kind)))


class TeiInfo(Struct, frozen=True, kw_only=True):
    """What Text Embeddings Inference reports of its model; here of the default base model."""

    model_id: str
    model_dtype: str
    model_type: TeiModelType
    max_input_length: int
    """Tokens."""
    max_client_batch_size: int
    """Texts of one request."""
    auto_truncate: bool = False
    version: str = __version__


class Wanted(NamedTuple):
    """What a body requests, whatever its form."""

    texts: Sequence[Prompt]
    pool: Pool
    field: str
    """Field that has the texts."""
    cut: PromptTruncation | None
    prefix: Prefix | None = None
    """Before texts; token ids are as the client made them."""
    names: Mapping[str, str] = MappingProxyType({})
    """Names of further fields."""


_COHERE_PROMPTS: Final = MappingProxyType(
    {
        "search_query": QUERY_PROMPTS,
        "search_document": DOCUMENT_PROMPTS,
        "classification": ("classification",),
        "clustering": ("clustering",),
    }
)
_TEI_POOLING: Final = MappingProxyType({PoolKind.LAST: "last_token"})
"""TEI's names of kinds, where they are others."""
_COHERE_SIDES: Final = MappingProxyType({"START": TruncationSide.LEFT, "END": TruncationSide.RIGHT})
_COHERE_TYPES: Final[Mapping[str, tuple[str, Callable[[Array], Any]]]] = MappingProxyType(
    {
        "float": ("numbers", lambda vector: vector.tolist()),
        "base64": ("base64", lambda vector: base64.b64encode(vector.tobytes()).decode()),
        "binary": ("binary", lambda vector: (np.packbits(vector > 0) - np.int16(128)).tolist()),
        "ubinary": ("ubinary", lambda vector: np.packbits(vector > 0).tolist()),
    }
)
"""The field of CohereEmbeddings, and the function that writes a vector."""

_describes: Final = dict[str, Any](
    tag="completions", headers=(BY_HEADER,), response_headers=(DIGESTS,), errors=ANY_ERROR
)


class EmbeddingEndpoints:
    """Each route reads its body into `Wanted`, and writes the outputs in its form."""

    def __init__(self, context: TextContext) -> None:
        self._context = context

    @described(json_of(EmbeddingList), body=json_body(EmbeddingBody), **_describes)
    async def embeddings(self, request: Request) -> Response:
        """Vectors of texts, by the base model or an adapter, in the order of the texts."""
        sent, body = await receive(self._context, request, EmbeddingBody)
        outputs = await self._outputs(sent, _wanted(sent, body))
        values = _written(body.encoding_format)
        return await _response(
            outputs,
            lambda: EmbeddingList(
                data=[
                    EmbeddingEntry(index=index, embedding=values(output.pooled))
                    for index, output in enumerate(outputs)
                ],
                model=sent.model,
                usage=usage_of(outputs),
            ),
        )

    @described(json_of(PoolingList), body=json_body(PoolingBody), **_describes)
    async def pooling(self, request: Request) -> Response:
        """Vectors of texts, or values of the classification head, in vLLM's form."""
        sent, body = await receive(self._context, request, PoolingBody)
        outputs = await self._outputs(sent, _pooling_wanted(sent, body))
        values = _written(body.encoding_format)
        return await _response(
            outputs,
            lambda: PoolingList(
                id=sent.id,
                created=sent.created,
                model=sent.model,
                data=[
                    PoolingEntry(index=index, data=values(output.pooled))
                    for index, output in enumerate(outputs)
                ],
                usage=usage_of(outputs),
            ),
        )

    @described(json_of(list[list[float]]), body=json_body(TeiEmbedBody), **_describes)
    async def tei_embed(self, request: Request) -> Response:
        """Vectors of texts in the form of Text Embeddings Inference."""
        sent, body = await receive(self._context, request, TeiEmbedBody)
        vectors = sent.target.model.vectors
        normalize = body.normalize is not False
        wanted = Wanted(
            [body.inputs] if isinstance(body.inputs, str) else body.inputs,
            vectors.pool(dimensions=body.dimensions, normalize=normalize),
            "inputs",
            body_truncation(body),
            Prefix(body.prompt_name),
        )
        outputs = await self._outputs(sent, wanted)
        return await _response(outputs, lambda: [_array(one.pooled).tolist() for one in outputs])

    @described(
        json_of_any(list[TeiPrediction], list[list[TeiPrediction]]),
        body=json_body(TeiPredictBody),
        **_describes,
    )
    async def tei_predict(self, request: Request) -> Response:
        """Labels of texts with their probabilities, the likeliest first, in the form of Text
        Embeddings Inference; a list for a list of texts."""
        sent, body = await receive(self._context, request, TeiPredictBody)
        classes = sent.target.model.classes
        pool = classes.pool(activation=False if body.raw_scores else None)
        wanted = Wanted(_predict_texts(body), pool, "inputs", body_truncation(body))
        outputs = await self._outputs(sent, wanted)

        def labelled(output: RequestOutput) -> list[TeiPrediction]:
            values = _array(output.pooled).tolist()
            found = map(TeiPrediction, classes.labels_of(len(values)), values)
            return sorted(found, key=lambda one: one.score, reverse=True)

        lists = [labelled(output) for output in outputs]
        return await _response(outputs, lambda: lists[0] if isinstance(body.inputs, str) else lists)

    @described(json_of(TeiInfo), tag="models")
    async def tei_info(self, request: Request) -> Response:
        """What the default base model is for, and its limits, in the form of Text Embeddings
        Inference."""
        card = (await self._context.target(None, self._context.principal(request))).model
        most = card.max_model_len if card.encoder is None else card.encoder.max_tokens
        return json_response(
            TeiInfo(
                model_id=card.name,
                model_dtype=card.dtype,
                model_type=TeiModelType.of(card),
                max_input_length=min(most, card.vectors.max_tokens or most),
                max_client_batch_size=MAX_INPUTS,
            )
        )

    @described(json_of(CohereEmbedding), body=json_body(CohereEmbedBody), **_describes)
    async def cohere_embed(self, request: Request) -> Response:
        """Vectors of texts in Cohere's form."""
        sent, body = await receive(self._context, request, CohereEmbedBody)
        outputs = await self._outputs(sent, _cohere_wanted(sent, body))
        types = dict.fromkeys(body.embedding_types or ["float"])

        def written() -> CohereEmbedding:
            vectors = [_array(output.pooled) for output in outputs]
            by_type: dict[str, Any] = {}
            for name in types:
                field, write = _COHERE_TYPES[name]
                by_type[field] = list(map(write, vectors))
            return CohereEmbedding(
                id=sent.id,
                embeddings=CohereEmbeddings(**by_type),
                texts=body.texts,
                meta=CohereMeta.of(outputs),
            )

        return await _response(outputs, written)

    async def _outputs(self, sent: Sent, wanted: Wanted) -> list[RequestOutput]:
        """Run a request for each text. Raises RequestErrors."""
        check_texts(wanted.field, wanted.texts)
        chosen = adapter_choices(sent.body, sent.target, sent.origin.adapter, len(wanted.texts))
        names = {"prompt": wanted.field, **wanted.names}
        requests = [
            msgspec.structs.replace(
                sent.request(adapters, wanted.cut),
                prompt=text,
                prefix=wanted.prefix,
                task=wanted.pool,
            )
            for text, adapters in zip(wanted.texts, chosen, strict=True)
        ]
        return await outputs_of(self._context, sent, requests, names)


def _wanted(sent: Sent, body: EmbeddingBody) -> Wanted:
    vectors = sent.target.model.vectors
    normalize = agreed(body, "normalize", "use_activation")
    pool = vectors.pool(dimensions=body.dimensions, normalize=normalize)
    texts = prompts(body.input, MAX_INPUTS, "input")
    return Wanted(texts, pool, "input", body_truncation(body), Prefix(body.prompt_name))


def _pooling_wanted(sent: Sent, body: PoolingBody) -> Wanted:
    if body.task in (None, "embed"):
        return _wanted(sent, body)
    if body.task != "classify":
        raise UnsupportedFeatureError(
            brief(f"tasks are embed and classify; not served: {body.task!r}"), param="task"
        )
    for field in ("dimensions", "normalize", "prompt_name"):
        if getattr(body, field) is not None:
            raise InvalidParameterError(f"{field} is for the task embed", param=field)
    pool = sent.target.model.classes.pool(activation=body.use_activation)
    return Wanted(prompts(body.input, MAX_INPUTS, "input"), pool, "input", body_truncation(body))


def _predict_texts(body: TeiPredictBody) -> Sequence[str]:
    if isinstance(body.inputs, str):
        return [body.inputs]
    for index, item in enumerate(body.inputs):
        if len(item) != 1:
            raise UnsupportedFeatureError(
                f"inputs[{index}] has {len(item)} texts: one text is classified at a time; pairs "
                "are for /rerank",
                param="inputs",
            )
    return list(itertools.chain.from_iterable(body.inputs))


def _cohere_wanted(sent: Sent, body: CohereEmbedBody) -> Wanted:
    vectors, side = sent.target.model.vectors, _COHERE_SIDES.get(body.truncate or "END")
    if side is None or body.truncate_prompt_tokens is not None:
        if body.max_tokens is not None:
            raise InvalidParameterError(
                "max_tokens cuts longer texts: it needs truncate START or END, and no "
                "truncate_prompt_tokens",
                param="max_tokens",
            )
        cut = body_truncation(body)
    else:
        cut = PromptTruncation(body.max_tokens, side)
    with named_as_sent({"dimensions": "output_dimension"}):
        pool = vectors.pool(dimensions=body.output_dimension)
    return Wanted(
        body.texts,
        pool,
        "texts",
        cut,
        Prefix(roles=_COHERE_PROMPTS.get(body.input_type or "", ())),
        {"dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"},
    )


async def _response(outputs: Sequence[RequestOutput], write: Callable[[], Any]) -> Response:
    num_characters = sum(len(output.pooled) for output in outputs) * _CHARACTERS_OF_BYTE
    response = await done(lambda: json_response(write()), num_characters)
    response.headers.update(adapter_headers(*outputs))
    return response


def _written(encoding_format: str | None) -> Callable[[bytes], Values]:
    if encoding_format == "base64":
        return lambda pooled: base64.b64encode(pooled).decode()
    return lambda pooled: _array(pooled).tolist()


def _array(pooled: bytes) -> Array:
    return np.frombuffer(pooled, "<f4")
