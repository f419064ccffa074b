"""Scores of pairs of texts: the requests for them, and the scores in what these yield."""

import asyncio
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from loraplex.core.errors import (
    ConfigError,
    InvalidParameterError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from loraplex.core.request import (
    GenerateRequest,
    Prefix,
    PromptTruncation,
    RequestId,
    TruncationSide,
)
from loraplex.core.score_format import PairTemplate, ScoreFormat, ScoreKind
from loraplex.core.task import Pool, PoolKind
from loraplex.serving.backend import TextModel
from loraplex.serving.local_texts import INLINE_CHARACTERS

QUERY_PROMPTS: Final = ("query",)
"""Names of the prompts that stand before queries, in the files of embedding models."""
DOCUMENT_PROMPTS: Final = ("document", "passage", "corpus")
_ROLES: Final = ("system", "query", "document")
"""Roles of the messages that a chat template joins to a pair."""
_MARK: Final = re.compile("\ue000(instruction|query|document)\ue001")
"""What stands for a text while a chat template is read: of private characters."""


MAX_REPEATED: Final = 1 << 26
"""Maximum number of characters or tokens that the prompts of one request repeat."""


class Pair(NamedTuple):
    query: str
    document: str


def pairs_of(
    queries: Sequence[str], documents: Sequence[str], names: tuple[str, str]
) -> list[Pair]:
    """Return the pairs of one query and all documents, or of as many queries as documents.

    names: of both in errors. Raises InvalidParameterError, also for an empty text.
    """
    for name, texts in zip(names, (queries, documents), strict=True):
        if not texts:
            raise InvalidParameterError(f"{name} is an empty list", param=name)
        for index, text in enumerate(texts):
            if not isinstance(text, str) or not text:
                raise InvalidParameterError(
                    f"{name}[{index}] must be a text that is not empty, got {text!r}", param=name
                )
    if len(queries) not in (1, len(documents)):
        raise InvalidParameterError(
            f"{names[0]} has {len(queries)} texts for {len(documents)} of {names[1]}; give one, or "
            "as many",
            param=names[0],
        )
    return list(map(Pair, list(queries) * (len(documents) // len(queries)), documents))


def check_repeated(param: str, length: int) -> None:
    """Raise InvalidParameterError if what all prompts of a request have in common is too long.

    length: characters or tokens in all prompts together. A small body would be prompts of any size.
    """
    if length > MAX_REPEATED:
        raise InvalidParameterError(
            f"the {param} is repeated in the prompt of each document: {length} characters or "
            f"tokens, at most {MAX_REPEATED} are allowed: shorten it, or send fewer documents",
            param=param,
        )


class ScoreOptions(NamedTuple):
    """What a request states of all its pairs."""

    instruction: str | None = None
    """None: the model's own."""
    truncation: PromptTruncation | None = None
    """Limit of a pair, or of each text that has a vector. None: what is too long is an error."""
    max_query_tokens: int | None = None
    """Queries are cut to so many tokens; None: they are not."""
    max_document_tokens: int | None = None

    def cut(self, max_inner: int | None, kept: tuple[int, int] | None) -> PromptTruncation | None:
        """Return the limit of a prompt, of which max_inner tokens stay between the kept ones."""
        truncation = self.truncation
        if truncation is None and max_inner is None:
            return None
        truncation = truncation or PromptTruncation(None, TruncationSide.RIGHT)
        return msgspec.structs.replace(truncation, kept=kept, max_inner=max_inner)


class Scoring(NamedTuple):
    """The requests of some pairs."""

    requests: tuple[GenerateRequest, ...]
    format: ScoreFormat
    places: Sequence[tuple[int, int]] = ()
    """VECTORS: the requests of the query and of the document of each pair."""

    def scores(self, pooled: Sequence[bytes], *, is_raw: bool = False) -> list[float]:
        """Return the score of each pair. pooled: what the requests yielded, float32,
        little-endian. is_raw: without the sigmoid. Raises UnsupportedFeatureError."""
        values = [np.frombuffer(one, "<f4").astype(np.float64) for one in pooled]
        if self.format.kind is ScoreKind.VECTORS:
            return [float(values[query] @ values[document]) for query, document in self.places]
        if self.format.kind is ScoreKind.HEAD and any(len(one) != 1 for one in values):
            raise UnsupportedFeatureError(
                f"the classification head gives {len(values[0])} labels; a score is the value of "
                "a head with one",
                param="model",
            )
        return [self.format.score(one.tolist(), is_raw=is_raw) for one in values]


async def scoring(
    model: TextModel,
    sent: GenerateRequest,
    pairs: Sequence[Pair],
    options: ScoreOptions,
    new_id: Callable[[], RequestId],
) -> Scoring:
    """Return the requests of pairs. sent: what they have in common.

    Raises UnsupportedFeatureError if the model scores no pairs, and other RequestErrors.
    """
    form = model.card.scores
    if form.problem and not (form.wants_head and sent.adapters):
        raise UnsupportedFeatureError(f"this model scores no pairs: {form.problem}", param="model")
    if form.kind is ScoreKind.VECTORS:
        return _of_vectors(model, sent, pairs, options, new_id)
    if options.max_query_tokens is not None:
        raise InvalidParameterError(
            "max_tokens_per_query is for models that make a vector of the query; here the model "
            "reads query and document together: max_tokens_per_doc cuts the document",
            param="max_tokens_per_query",
        )
    check_repeated("query", sum(len(pair.query) for pair in pairs))
    check_repeated("instruction", len(options.instruction or "") * len(pairs))
    task = _task(model, form)
    template = await _template(model, form, options)
    if template is None:
        make = functools.partial(_joined, model, pairs, options)
        length = sum(len(pair.query) + len(pair.document) for pair in pairs)
    else:
        instruction = form.instruction if options.instruction is None else options.instruction
        make = functools.partial(_filled, model, template, instruction, pairs, options)
        fixed = len(instruction) + sum(map(len, template.parts[::2]))
        length = sum(fixed + len(query) for query in {pair.query for pair in pairs})
    prompts = make() if length <= INLINE_CHARACTERS else await asyncio.to_thread(make)
    requests = (
        msgspec.structs.replace(
            sent,
            request_id=new_id(),
            prompt=prompt,
            task=task,
            truncation=truncation,
            add_special_tokens=False,
        )
        for prompt, truncation in prompts
    )
    return Scoring(tuple(requests), form)


def _of_vectors(
    model: TextModel,
    sent: GenerateRequest,
    pairs: Sequence[Pair],
    options: ScoreOptions,
    new_id: Callable[[], RequestId],
) -> Scoring:
    """Return a request for each different text."""
    if options.instruction is not None:
        raise _no_instruction("its vectors are of one text each")
    pool = model.card.vectors.pool(normalize=True)
    sides = (
        (Prefix(roles=QUERY_PROMPTS), options.cut(options.max_query_tokens, None)),
        (Prefix(roles=DOCUMENT_PROMPTS), options.cut(options.max_document_tokens, None)),
    )
    numbers: dict[tuple[int, str], int] = {}
    places = [
        (
            numbers.setdefault((0, pair.query), len(numbers)),
            numbers.setdefault((1, pair.document), len(numbers)),
        )
        for pair in pairs
    ]
    requests = (
        msgspec.structs.replace(
            sent,
            request_id=new_id(),
            prompt=text,
            prefix=sides[side][0],
            task=pool,
            truncation=sides[side][1],
        )
        for side, text in numbers
    )
    return Scoring(tuple(requests), model.card.scores, places)


def _task(model: TextModel, form: ScoreFormat) -> Pool:
    if form.kind is ScoreKind.HEAD:
        return model.card.classes.pool(activation=False)
    return Pool(PoolKind.LOGITS, normalize=False, token_ids=form.token_ids)


_Prompt = tuple[str | tuple[int, ...], PromptTruncation | None]


async def _template(
    model: TextModel, form: ScoreFormat, options: ScoreOptions
) -> PairTemplate | None:
    """Return the template of a pair; None: the tokenizer joins it."""
    template = form.template
    if template is None and form.renders:
        has_instruction = options.instruction is not None or bool(form.instruction)
        template = await _rendered(model, form, has_instruction=has_instruction)
    if options.instruction is not None and (template is None or not template.takes_instruction):
        raise _no_instruction("the prompt of its pairs has no place for one")
    return template


async def _rendered(model: TextModel, form: ScoreFormat, *, has_instruction: bool) -> PairTemplate:
    """Return the chat template's prompt of a pair, with marks in place of the texts."""
    variables: dict[str, Any] = dict(form.template_options)
    begins_turn = bool(variables.pop("add_generation_prompt", False))
    named = dict(zip(_ROLES, ("instruction", "query", "document"), strict=True))
    messages = [
        {"role": role, "content": f"\ue000{name}\ue001"}
        for role, name in named.items()
        if has_instruction or role != "system"
    ]
    try:
        text = await model.chats.render(
            messages,
            add_generation_prompt=begins_turn,
            template_kwargs=variables or None,
            roles=_ROLES,
        )
        return PairTemplate.of(text, _MARK)
    except (ConfigError, InvalidRequestError) as error:
        raise UnsupportedFeatureError(
            f"the model's chat template makes no prompt of a query and a document: {error.message}",
            param="model",
        ) from error


def _no_instruction(reason: str) -> InvalidParameterError:
    return InvalidParameterError(
        f"instruction is not for this model: {reason}", param="instruction"
    )


def _filled(
    model: TextModel,
    template: PairTemplate,
    instruction: str,
    pairs: Sequence[Pair],
    options: ScoreOptions,
) -> list[_Prompt]:
    """Return the prompts of a template. What surrounds the document is not cut."""
    is_cut = options.cut(options.max_document_tokens, None) is not None
    around: dict[str, tuple[str, str]] = {}
    kept: dict[str, tuple[int, int]] = {}
    for query in dict.fromkeys(pair.query for pair in pairs):
        before, after = around[query] = template.around(query, instruction)
        if is_cut:
            ends = (model.tokenize(text, add_special_tokens=False) for text in (before, after))
            first, last = map(len, ends)
            kept[query] = first, last
    return [
        (
            pair.document.join(around[pair.query]),
            options.cut(options.max_document_tokens, kept.get(pair.query)),
        )
        for pair in pairs
    ]


def _joined(model: TextModel, pairs: Sequence[Pair], options: ScoreOptions) -> list[_Prompt]:
    """Return the prompts that the tokenizer makes of pairs. Only documents are cut."""
    prompts: list[_Prompt] = []
    for pair in pairs:
        tokens = model.tokenize_pair(*pair)
        kept = tokens.start, len(tokens.token_ids) - tokens.end
        prompts.append((tuple(tokens.token_ids), options.cut(options.max_document_tokens, kept)))
    return prompts
