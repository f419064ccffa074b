"""Scores of pairs of texts: vLLM's /score and /rerank, and the forms of Jina, Cohere, SGLang and
Text Embeddings Inference on the same paths.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.errors import InvalidParameterError
from loraplex.core.output import RequestOutput
from loraplex.core.request import PromptTruncation, TruncationSide
from loraplex.core.task import Pool, PoolKind
from loraplex.frontends.field_names import named_as_sent
from loraplex.frontends.openai.adapter_fields import adapter_choices
from loraplex.frontends.openai.context import BY_HEADER, DIGESTS, TextContext, json_response
from loraplex.frontends.openai.convert import Prompt
from loraplex.frontends.openai.embeddings import CohereMeta
from loraplex.frontends.openai.pooled import (
    PooledUsage,
    Sent,
    body_truncation,
    check_number,
    check_texts,
    outputs_of,
    receive,
    usage_of,
)
from loraplex.frontends.openai.schema import PairBody, RerankBody, ScoreBody
from loraplex.frontends.openai.writers import adapter_headers
from loraplex.frontends.openapi.operation import ANY_ERROR, described, json_body, json_of_any
from loraplex.frontends.streams import done
from loraplex.serving.scoring import Pair, ScoreOptions, check_repeated, pairs_of, scoring


class ScoreEntry(Struct, frozen=True, kw_only=True):
    index: int
    """Number of the pair."""
    score: float
    object: Literal["score"] = "score"


class ScoreList(Struct, frozen=True, kw_only=True):
    id: str
    created: int
    """Unix seconds."""
    model: str
    data: list[ScoreEntry]
    usage: PooledUsage
    object: Literal["list"] = "list"


class ResultDocument(Struct, frozen=True):
    text: str


class RerankResult(Struct, frozen=True):
    index: int
    """Number of the document."""
    relevance_score: float
    document: ResultDocument | msgspec.UnsetType = msgspec.UNSET
    """Left out if return_documents is false."""


class RerankList(Struct, frozen=True):
    """Documents by their scores, the best first."""

    id: str
    model: str
    usage: PooledUsage
    results: list[RerankResult]


class CohereRerank(Struct, frozen=True):
    """Documents by their scores, the best first."""

    id: str
    results: list[RerankResult]
    meta: CohereMeta


class TeiRank(Struct, frozen=True):
    index: int
    score: float
    text: str | msgspec.UnsetType = msgspec.UNSET
    """Left out unless return_text is true."""


class LabelScores(Struct, frozen=True, kw_only=True):
    """Probabilities of tokens, in SGLang's form."""

    scores: list[list[float]]
    """Probabilities of each item, in the order of label_token_ids."""
    model: str
    usage: PooledUsage
    object: Literal["scoring"] = "scoring"


class Scored(NamedTuple):
    """The scores of the pairs of a request."""

    sent: Sent
    pairs: Sequence[Pair]
    scores: Sequence[float]
    outputs: Sequence[RequestOutput]


class Form(NamedTuple):
    """How one protocol names queries and documents, and what it returns."""

    query: str
    documents: str
    reply: Callable[[Any, Scored], Any]
    own: frozenset[str] = frozenset()
    """Further fields that no other form of the route has."""
    mark: str = ""
    """Field that a body must have, too, to be of this form."""
    cuts: bool = False
    """Whether documents that are too long are cut if the body states nothing."""


def _score_list(body: ScoreBody, scored: Scored) -> ScoreList:  # noqa: ARG001
    return ScoreList(
        id=scored.sent.id,
        created=scored.sent.created,
        model=scored.sent.model,
        data=[ScoreEntry(index=at, score=score) for at, score in enumerate(scored.scores)],
        usage=usage_of(scored.outputs),
    )


def _ranked(body: RerankBody, scored: Scored) -> list[int]:
    """Return the numbers of the best documents, of equal ones the first."""
    order = sorted(range(len(scored.scores)), key=lambda at: -scored.scores[at])
    return order[: body.top_n or None]


def _results(body: RerankBody, scored: Scored, *, with_documents: bool) -> list[RerankResult]:
    return [
        RerankResult(
            at,
            scored.scores[at],
            ResultDocument(scored.pairs[at].document) if with_documents else msgspec.UNSET,
        )
        for at in _ranked(body, scored)
    ]


def _rerank_list(body: RerankBody, scored: Scored) -> RerankList:
    results = _results(body, scored, with_documents=body.return_documents is not False)
    return RerankList(scored.sent.id, scored.sent.model, usage_of(scored.outputs), results)


def _cohere_rerank(body: RerankBody, scored: Scored) -> CohereRerank:
    results = _results(body, scored, with_documents=body.return_documents is True)
    return CohereRerank(scored.sent.id, results, CohereMeta.of(scored.outputs))


def _tei_ranks(body: RerankBody, scored: Scored) -> list[TeiRank]:
    return [
        TeiRank(
            at, scored.scores[at], scored.pairs[at].document if body.return_text else msgspec.UNSET
        )
        for at in _ranked(body, scored)
    ]


_SGLANG: Final = Form(
    *("query", "items", _score_list),
    frozenset({"label_token_ids", "apply_softmax", "item_first"}),
    "label_token_ids",
)
_SCORE_FORMS: Final = (
    Form("queries", "documents", _score_list),
    Form("queries", "items", _score_list),
    Form("text_1", "text_2", _score_list),
    Form("data_1", "data_2", _score_list),
    _SGLANG,
)
_LIMITS: Final = ("max_tokens_per_query", "max_tokens_per_doc")
_OF_JINA: Final = frozenset({"top_n", "return_documents"})
_OF_TEI: Final = frozenset({"raw_scores", "return_text", "truncate", "truncation_direction"})
_TEI: Final = Form("query", "texts", _tei_ranks, _OF_TEI)
_RERANK_FORMS: Final = (Form("query", "documents", _rerank_list, _OF_JINA), _TEI)
_COHERE_FORMS: Final = (Form("query", "documents", _cohere_rerank, _OF_JINA, cuts=True), _TEI)

_CHARACTERS_OF_NUMBER: Final = 20

_describes: Final = dict[str, Any](
    tag="completions", headers=(BY_HEADER,), response_headers=(DIGESTS,), errors=ANY_ERROR
)


class ScoringEndpoints:
    """POST /score and /rerank. A client that disconnects aborts its requests."""

    def __init__(self, context: TextContext) -> None:
        self._context = context

    @described(json_of_any(ScoreList, LabelScores), body=json_body(ScoreBody), **_describes)
    async def score(self, request: Request) -> Response:
        """How well documents fit queries: cosines of vectors, values of a classification head, or
        the model's judgement, whichever the model's folder states. With `label_token_ids`, the
        probabilities of these tokens in SGLang's form."""
        sent, body = await receive(self._context, request, ScoreBody)
        form = _form(body, _SCORE_FORMS)
        if form is _SGLANG:
            return await self._of_labels(sent, body)
        return await self._scored(sent, body, form)

    @described(json_of_any(RerankList, list[TeiRank]), body=json_body(RerankBody), **_describes)
    async def rerank(self, request: Request) -> Response:
        """Documents by how well they fit a query, the best first. With `texts`, in the form of Text
        Embeddings Inference."""
        sent, body = await receive(self._context, request, RerankBody)
        return await self._scored(sent, body, _form(body, _RERANK_FORMS))

    @described(json_of_any(CohereRerank, list[TeiRank]), body=json_body(RerankBody), **_describes)
    async def cohere_rerank(self, request: Request) -> Response:
        """The same in Cohere's form. Documents that are too long are cut."""
        sent, body = await receive(self._context, request, RerankBody)
        return await self._scored(sent, body, _form(body, _COHERE_FORMS))

    async def _scored(self, sent: Sent, body: Any, form: Form) -> Response:
        pairs = _pairs(body, form)
        _at_least(body, "top_n", 0)
        options = ScoreOptions(
            body.instruction,
            _truncation(body, form),
            *(_at_least(body, name, 1) for name in _LIMITS),
        )
        [adapters] = adapter_choices(body, sent.target, sent.origin.adapter)
        with named_as_sent({"query": form.query}):
            wanted = await scoring(
                self._context.backend.model(sent.target.model.name),
                sent.request(adapters, None),
                pairs,
                options,
                sent.origin.new_request_id,
            )
        names = {"prompt": form.documents}
        outputs = await outputs_of(self._context, sent, wanted.requests, names)
        scores = wanted.scores([output.pooled for output in outputs], is_raw=_is_raw(body))
        scored = Scored(sent, pairs, scores, outputs)
        num_characters = sum(len(pair.document) for pair in pairs)
        response = await done(lambda: json_response(form.reply(body, scored)), num_characters)
        response.headers.update(adapter_headers(*outputs))
        return response

    async def _of_labels(self, sent: Sent, body: ScoreBody) -> Response:
        """Return the probabilities of tokens after a query and each item."""
        labels = tuple(body.label_token_ids or ())
        for name in ("instruction", "use_activation", *_LIMITS):
            if getattr(body, name) is not None:
                raise InvalidParameterError(f"{name} is not for label_token_ids", param=name)
        [query] = _prompts(body.query)
        items = _prompts(body.items)
        check_texts("items", items)
        check_texts("query", [query])
        if {type(query)} != {type(item) for item in items}:
            raise InvalidParameterError(
                "query and items must all be texts, or all be lists of token ids", param="items"
            )
        check_repeated("query", len(query) * len(items))
        pairs: Any = [(item, query) if body.item_first else (query, item) for item in items]
        [adapters] = adapter_choices(body, sent.target, sent.origin.adapter)
        task = Pool(PoolKind.LOGITS, normalize=False, token_ids=labels, is_logprobs=True)
        requests = [
            msgspec.structs.replace(
                sent.request(adapters, body_truncation(body)),
                prompt=first + second if isinstance(first, str) else (*first, *second),
                task=task,
            )
            for first, second in pairs
        ]
        names = {"prompt": "items", "token_ids": "label_token_ids"}
        outputs = await outputs_of(self._context, sent, requests, names)

        def written() -> Response:
            pooled = [output.pooled for output in outputs]
            scores = probabilities(pooled, is_share=body.apply_softmax is True)
            return json_response(
                LabelScores(scores=scores, model=sent.model, usage=usage_of(outputs))
            )

        response = await done(written, len(outputs) * len(labels) * _CHARACTERS_OF_NUMBER)
        response.headers.update(adapter_headers(*outputs))
        return response


def probabilities(pooled: Sequence[bytes], *, is_share: bool) -> list[list[float]]:
    """Return the probabilities of log probabilities, float32, of which each item has as many.

    is_share: those of an item add up to 1, also where each of them is too small for a float.
    """
    values = np.array([np.frombuffer(one, "<f4") for one in pooled])
    if is_share:
        values -= values.max(1, keepdims=True)
    found = np.exp(values)
    if is_share:
        found /= found.sum(1, keepdims=True)
    lists: list[list[float]] = found.tolist()
    return lists


def _form(body: PairBody, forms: Sequence[Form]) -> Form:
    """Return the form of a body: the one whose texts it has.

    Raises InvalidParameterError for none, and for fields of another one.
    """
    given = {name for name in body.model_fields_set if getattr(body, name) is not None}
    fitting = [form for form in forms if {form.query, form.documents, form.mark} <= {"", *given}]
    if not fitting:
        shown = ", or ".join(f"{form.query} and {form.documents}" for form in forms)
        raise InvalidParameterError(f"give {shown}", param=forms[0].documents)
    form = fitting[0]
    own = {form.query, form.documents} | form.own
    others = {name for other in forms for name in (other.query, other.documents, *other.own)}
    for name in sorted((others - own) & given):
        raise InvalidParameterError(
            f"{name} does not go with {form.query} and {form.documents}", param=name
        )
    return form


def _pairs(body: PairBody, form: Form) -> list[Pair]:
    """Return the pairs of a body: one query for all documents, or one for each."""
    queries, documents = (_texts(body, name) for name in (form.query, form.documents))
    check_number(form.documents, documents)
    return pairs_of(queries, documents, (form.query, form.documents))


def _texts(body: PairBody, name: str) -> list[str]:
    value: Any = getattr(body, name)
    if isinstance(value, str):
        return [value]
    for index, item in enumerate(value):
        if isinstance(item, dict) and item.keys() != {"text"}:
            raise InvalidParameterError(
                f"{name}[{index}] must be a text, or an object with nothing but a text, got the "
                f"fields {', '.join(item)[:60] or 'none'}",
                param=f"{name}[{index}]",
            )
        if isinstance(item, list):
            raise InvalidParameterError(
                f"{name}[{index}] must be a text; token ids are for query and items with "
                "label_token_ids",
                param=f"{name}[{index}]",
            )
    return [item if isinstance(item, str) else item["text"] for item in value]


def _prompts(value: Any) -> list[Prompt]:
    """Return the texts or token ids of SGLang's fields."""
    if isinstance(value, str):
        return [value]
    if value and isinstance(value[0], int):
        return [tuple(value)]
    return [item if isinstance(item, str) else tuple(item) for item in value] or [()]


def _truncation(body: PairBody, form: Form) -> PromptTruncation | None:
    cut = body_truncation(body)
    return PromptTruncation(None, TruncationSide.RIGHT) if cut is None and form.cuts else cut


def _at_least(body: PairBody, name: str, least: int) -> int | None:
    """Return the number in a field, if the body has it. Raises InvalidParameterError."""
    number: int | None = getattr(body, name, None)
    if number is not None and number < least:
        raise InvalidParameterError(f"{name} must be at least {least}, got {number}", param=name)
    return number


def _is_raw(body: PairBody) -> bool:
    return body.use_activation is False or getattr(body, "raw_scores", None) is True
