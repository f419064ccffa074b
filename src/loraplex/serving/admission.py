"""Admission of a request: limits, defaults, its composition of adapters, seed and KV salt.

Pure functions. What can be known to be wrong with a request is refused here: by `check_request`
before its adapters are looked up and its texts are tokenized, and by `admit` afterwards.
"""

import itertools
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.store import AdapterVersion
from loraplex.core.adapter import (
    EMBEDDING,
    LM_HEAD,
    OUTSIDE_LAYERS,
    AdapterChoice,
    AdapterUse,
    LoadPolicy,
    TargetPart,
)
from loraplex.core.errors import (
    InvalidParameterError,
    InvalidRequestError,
    PromptTooLongError,
    TokenOutOfVocabularyError,
    UnsupportedFeatureError,
)
from loraplex.core.principal import Principal
from loraplex.core.request import (
    EngineRequest,
    GenerateRequest,
    PromptTruncation,
    TruncationSide,
)
from loraplex.core.retention import check_retention
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate, Pool, PoolKind, Task
from loraplex.memory.kv_salt import kv_salt
from loraplex.serving.backend import EncoderFormat, ModelCard

NO_END_ID = -1
"""Value of end_id for which no token ends the text."""
MAX_ADAPTERS: Final = 16
"""Maximum number of adapters of one request."""
MAX_SCALE: Final = 100.0
"""Maximum absolute scale of an adapter. Outputs are noise at far smaller scales already."""
_UINT64 = 2**64
_MAX_PRIORITY = 2**31 - 1
_LONGEST_TIMEOUT_SECONDS = 1e8
"""Three years. What is longer is as good as none, and may be too large for a clock."""

Composition = list[tuple[AdapterVersion, float]]
"""Versions and the scale of each."""

_Place = tuple[int, str]
"""Layer and module."""

_REPLACING = frozenset({TargetPart.ROWS, TargetPart.TOKENS})


def check_request(request: GenerateRequest) -> None:
    """Check the values of a request that depend on no model. Raises RequestErrors."""
    if request.prompt == "":
        raise InvalidRequestError("the prompt is empty: give at least one token", param="prompt")
    task = request.task
    (task.sampling if isinstance(task, Generate) else task).validate()
    check_adapters(request.adapters)
    if type(request.priority) is not int or abs(request.priority) > _MAX_PRIORITY:
        # An engine compares it with that of others.
        raise InvalidParameterError(
            f"priority must be an integer in [{-_MAX_PRIORITY}, {_MAX_PRIORITY}], got "
            f"{request.priority!r}",
            param="priority",
        )
    if request.retention is not None:
        check_retention(request.retention)
    seconds = request.timeout_seconds
    # The comparison is false for NaN, too.
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise InvalidParameterError(
            f"the timeout must be more than 0 seconds, got {seconds!r}", param="timeout_seconds"
        )
    if request.end_id not in (None, NO_END_ID) and type(request.end_id) is not int:
        raise InvalidParameterError(
            f"end_id must be a token id, or -1 for none, got {request.end_id!r}", param="end_id"
        )


def check_adapters(adapters: Sequence[AdapterChoice]) -> None:
    """Raise InvalidParameterError for too many adapters, or a scale that is out of its range."""
    if len(adapters) > MAX_ADAPTERS:
        raise InvalidParameterError(
            f"adapters has {len(adapters)} entries; at most {MAX_ADAPTERS} are allowed in one "
            "request",
            param="adapters",
        )
    for adapter in adapters:
        if not abs(adapter.scale) <= MAX_SCALE:  # true for NaN, too
            raise InvalidParameterError(
                f"an adapter's scale must be in [{-MAX_SCALE:g}, {MAX_SCALE:g}], got "
                f"{adapter.scale:g}",
                param="adapters",
            )


def compose(chosen: Composition, shapes: BaseShapes) -> Composition:
    """Return the composition in the one order that identifies its KV cache.

    With t_i the request's scales and W_i a weight W of the base with adapter i merged into it, the
    request uses W + sum t_i (W_i - W): for LoRA that is the concatenation of the ranks, and it is
    also defined for biases, DoRA and one whole copy. The order of the adapters has no meaning.

    Each digest occurs once, with the sum of its scales, in ascending order; scale 0 is left out.
    Raises UnsupportedFeatureError if one adapter replaces what another one changes.
    """
    scales: dict[str, list[float]] = {}
    versions: dict[str, AdapterVersion] = {}
    for version, scale in chosen:
        versions.setdefault(version.digest, version)
        scales.setdefault(version.digest, []).append(scale)
    # fsum: with it the sum does not depend on the order either.
    sums = {digest: math.fsum(scales[digest]) for digest in sorted(scales)}
    composition = [(versions[digest], scale) for digest, scale in sums.items() if scale != 0.0]
    # Of two adapters of which one replaces what the other changes, the last would win.
    for (version, _), (other, _) in itertools.permutations(composition, 2):
        contested = _replaced(version, shapes) & _changed(other)
        if contested:
            _, module = min(contested)
            raise UnsupportedFeatureError(
                f"adapters {version.name!r} and {other.name!r} cannot be composed: the first "
                f"replaces rows of {module}, which the other changes too; use one of them, or "
                f"adapters that leave {module} alone",
                param="adapters",
            )
    return composition


def check_head(task: Task, composition: Composition, model: ModelCard) -> None:
    """Raise UnsupportedFeatureError for a classification without a head."""
    if not (isinstance(task, Pool) and task.kind is PoolKind.SCORE) or model.classes.num_labels:
        return
    if any(version.source.num_labels for version, _ in composition):
        return
    names = " and ".join(repr(version.name) for version, _ in composition)
    adapters = f"adapter {names} has no classification head (score), and " if names else ""
    raise UnsupportedFeatureError(
        f"{adapters}model {model.name!r} has {'none' if names else 'no classification head'}: "
        "classify with an adapter that has one (PEFT's task type SEQ_CLS, with score in "
        "modules_to_save)",
        param="adapter",
    )


def _replaced(version: AdapterVersion, shapes: BaseShapes) -> set[_Place]:
    """Return where an adapter replaces rows, including tied parameters."""
    places = {
        (target.layer, target.module)
        for target in version.source.targets
        if target.part in _REPLACING
    }
    if shapes.ties_embeddings and places:
        places |= {(OUTSIDE_LAYERS, EMBEDDING), (OUTSIDE_LAYERS, LM_HEAD)}
    return places


def _changed(version: AdapterVersion) -> set[_Place]:
    return {(target.layer, target.module) for target in version.source.targets}


def admit(
    request: GenerateRequest,
    prompt_token_ids: Sequence[int],
    *,
    model: ModelCard,
    eos_token_ids: tuple[int, ...],
    adapters: tuple[AdapterUse, ...],
    principal: Principal,
    now_ns: int,
    share_weight: float = 1.0,
    encoder_token_ids: Sequence[int] = (),
) -> EngineRequest:
    """Return a checked and tokenized request as its engine gets it. Raises RequestErrors."""
    task = request.task
    if model.encoder is not None:
        check_encoder_input(request, encoder_token_ids, model)
    _check_length(prompt_token_ids, model, task, _name_of_prompt(request, model))
    _check_ids(request, prompt_token_ids, model)
    ends = eos_token_ids
    if request.end_id is not None and request.end_id != NO_END_ID:
        # Without an end the model's own stay, though ignored: a grammar ends with one.
        ends = (request.end_id,)
    if isinstance(task, Generate) and task.sampling.grammar is not None and not ends:
        raise UnsupportedFeatureError(
            f"model {model.name!r} has no end-of-text token, so its output cannot be kept to a "
            "grammar: give an end_id",
            param="grammar",
        )
    for adapter in adapters:
        if not math.isfinite(adapter.scale):
            raise InvalidParameterError(f"an adapter's scale must be finite, got {adapter.scale}")
    seconds = math.inf if request.timeout_seconds is None else request.timeout_seconds
    is_endless = seconds > _LONGEST_TIMEOUT_SECONDS
    return EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        encoder_token_ids=tuple(encoder_token_ids),
        task=(
            Generate(_complete(request, len(prompt_token_ids), model))
            if isinstance(task, Generate)
            else task
        ),
        eos_token_ids=ends,
        adapters=adapters,
        kv_salt=kv_salt(
            model.name,
            model.kv_dtype,
            tuple((adapter.digest, adapter.scale) for adapter in adapters),
            principal.tenant,
            request.cache_salt,
        ),
        tenant=principal.tenant,
        share_weight=share_weight,
        priority=request.priority,
        arrival_ns=now_ns,
        deadline_ns=None if is_endless else now_ns + int(seconds * 1e9),
        requires_resident=request.load_policy is LoadPolicy.NEVER,
        retention=request.retention,
    )


def cut_prompt(
    request: GenerateRequest,
    truncation: PromptTruncation,
    token_ids: Sequence[int],
    model: ModelCard,
    num_special: tuple[int, int] = (0, 0),
) -> Sequence[int]:
    """Return what the request's truncation leaves of its prompt.

    num_special: tokens at the beginning and at the end that stay. Raises InvalidParameterError for
    a number of tokens below 1, without these.
    """
    most = truncation.max_tokens
    if most is None and model.encoder is not None:
        most = model.encoder.max_tokens
    elif most is None:
        is_generated = isinstance(request.task, Generate)
        most = model.max_model_len - (request.sampling.max_tokens or 1 if is_generated else 0)
        limits = (model.max_input_len, None if is_generated else model.vectors.max_tokens)
        most = min([most, *(limit for limit in limits if limit is not None)])
    num_kept = sum(num_special)
    if truncation.max_inner is not None:
        most = min(most, num_kept + truncation.max_inner)
    if type(most) is not int or most - num_kept < 1:
        raise InvalidParameterError(
            f"truncate_prompt_tokens leaves {most} tokens of the prompt; at least {num_kept + 1} "
            f"{'are' if num_kept else 'is'} needed",
            param="truncate_prompt_tokens",
        )
    if len(token_ids) <= most:
        return token_ids
    first, end = num_special[0], len(token_ids) - num_special[1]
    num_inner = most - num_kept
    is_left = truncation.side is TruncationSide.LEFT
    inner = token_ids[end - num_inner : end] if is_left else token_ids[first : first + num_inner]
    return [*token_ids[:first], *inner, *token_ids[end:]]


def first_ids(
    encoder: EncoderFormat, given: tuple[int, ...] | None, forced: int | None
) -> tuple[int, ...]:
    """Return what the decoder of a model with an encoder begins with.

    given: the request's decoder prompt, which gets the model's first token unless it begins with
    it, as in transformers. forced: the token after the first one, where there is no such prompt.
    Raises InvalidParameterError for both.
    """
    start = encoder.first_ids[0]
    if given is None:
        return encoder.first_ids if forced is None else (start, forced)
    if forced is not None:
        raise InvalidParameterError(
            "decoder_prompt and forced_bos_token_id are both what the output begins with: give one",
            param="forced_bos_token_id",
        )
    return given if given[:1] == (start,) else (start, *given)


def check_encoder_input(
    request: GenerateRequest, token_ids: Sequence[int], model: ModelCard
) -> None:
    """Raise for what a model with an encoder does not take, and for an input that is too long."""
    assert model.encoder is not None
    if isinstance(request.task, Pool):
        raise UnsupportedFeatureError(
            f"model {model.name!r} has an encoder and a decoder, and makes neither vectors nor "
            "scores of texts: send the text to /v1/completions"
        )
    if not token_ids:
        raise InvalidRequestError("the prompt is empty: give at least one token", param="prompt")
    if len(token_ids) > model.encoder.max_tokens:
        raise PromptTooLongError(
            f"the prompt has {len(token_ids)} tokens; the encoder of model {model.name!r} takes at "
            f"most {model.encoder.max_tokens} (one step encodes them: see max_num_batched_tokens)",
            param="prompt",
        )
    if (
        request.task.sampling.prompt_logprobs is not None
        or request.task.sampling.return_prompt_logits
    ):
        raise UnsupportedFeatureError(
            f"model {model.name!r} has an encoder, which scores no prompts: leave out echo with "
            "logprobs, prompt_logprobs and return_context_logits",
            param="prompt_logprobs",
        )
    _check_in_vocabulary("prompt", token_ids, model)


def without_padding(token_ids: Sequence[int], pad_token_id: int | None) -> Sequence[int]:
    """Return a prompt without padding at its end, as transformers classifies it.

    It takes the last token that is no padding, also where the text itself ends with that token, as
    with a pad token that is the end token; of nothing but padding the first one.
    """
    end = len(token_ids)
    while end > 1 and token_ids[end - 1] == pad_token_id:
        end -= 1
    return token_ids[:end]


def _name_of_prompt(request: GenerateRequest, model: ModelCard) -> str:
    """Return the field that has what the decoder begins with."""
    if model.encoder is None:
        return "prompt"
    return "decoder_prompt" if request.forced_bos_token_id is None else "forced_bos_token_id"


def _check_length(token_ids: Sequence[int], model: ModelCard, task: Task, param: str) -> None:
    """Raise unless there is a prompt that leaves space for what the task needs."""
    num_new_tokens = int(isinstance(task, Generate))
    if not token_ids:
        raise InvalidRequestError("the prompt is empty: give at least one token", param="prompt")
    if len(token_ids) + num_new_tokens > model.max_model_len:
        of_output = " and one of output" if num_new_tokens else ""
        raise PromptTooLongError(
            f"the {param} has {len(token_ids)} tokens; model {model.name!r} takes at most "
            f"{model.max_model_len - num_new_tokens}{of_output} (max_model_len "
            f"{model.max_model_len})",
            param=param,
        )
    if model.max_input_len is not None and len(token_ids) > model.max_input_len:
        # TensorRT-LLM's words: clients know them.
        raise PromptTooLongError(
            f"Prompt length ({len(token_ids)}) exceeds maximum input length "
            f"({model.max_input_len}) of model {model.name!r}: see max_input_len",
            param="prompt",
        )
    longest = model.vectors.max_tokens
    if isinstance(task, Pool) and longest is not None and len(token_ids) > longest:
        raise PromptTooLongError(
            f"the text has {len(token_ids)} tokens; model {model.name!r} makes vectors of at most "
            f"{longest} (max_seq_length of its folder); truncate_prompt_tokens cuts longer ones",
            param="prompt",
        )
    if isinstance(task, Pool) and task.num_left_out >= len(token_ids):
        raise InvalidParameterError(
            f"the text has {len(token_ids)} tokens with its prompt, and the vector leaves the "
            f"first {task.num_left_out} out (include_prompt false): no token is left",
            param="prompt",
        )


def _check_ids(request: GenerateRequest, prompt: Sequence[int], model: ModelCard) -> None:
    """Raise TokenOutOfVocabularyError for the first id that the model does not have."""
    ids: dict[str, Sequence[int]] = {_name_of_prompt(request, model): prompt}
    if isinstance(request.task, Generate):
        sampling, flat = request.task.sampling, itertools.chain.from_iterable
        ids |= {
            "stop_token_ids": sampling.stop_token_ids,
            "allowed_token_ids": sampling.allowed_token_ids,
            "stop_token_sequences": tuple(flat(sampling.stop_token_sequences)),
            "bad_token_ids": tuple(flat(sampling.bad_token_ids)),
            "logit_bias": [token_id for token_id, _ in sampling.logit_bias],
            "top_p_reset_id": [] if sampling.top_p_reset_id is None else [sampling.top_p_reset_id],
        }
    if type(request.end_id) is int and request.end_id != NO_END_ID:
        ids["end_id"] = (request.end_id,)
    if isinstance(request.task, Pool):
        ids["token_ids"] = request.task.token_ids
    for param, token_ids in ids.items():
        _check_in_vocabulary(param, token_ids, model)


def _check_in_vocabulary(param: str, token_ids: Sequence[int], model: ModelCard) -> None:
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token_id < model.vocab_size:
            raise TokenOutOfVocabularyError(
                f"{param}: token id {token_id} is out of the vocabulary of model {model.name!r}, "
                f"which is 0 to {model.vocab_size - 1}",
                param=param,
            )


def _complete(request: GenerateRequest, num_prompt_tokens: int, model: ModelCard) -> SamplingParams:
    """Set max_tokens and seed, so that a replay after a crash is the same request; and what
    serving needs to know of the tokens itself."""
    sampling = request.sampling
    max_new_tokens = model.max_model_len - num_prompt_tokens
    max_tokens = max_new_tokens if sampling.max_tokens is None else sampling.max_tokens
    if request.ends_at_max_len:
        max_tokens = min(max_tokens, max_new_tokens)
    if max_tokens > max_new_tokens:
        raise PromptTooLongError(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}: together "
            f"more than the {model.max_model_len} of model {model.name!r}; request at most "
            f"{max_new_tokens}",
            param="max_tokens",
        )
    if sampling.min_tokens > max_tokens:
        raise PromptTooLongError(
            f"the prompt has {num_prompt_tokens} tokens and min_tokens is {sampling.min_tokens}: "
            f"together more than the {model.max_model_len} of model {model.name!r}",
            param="min_tokens",
        )
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed % _UINT64
    chooses_best = sampling.best_of is not None and sampling.best_of > sampling.n
    bad_token_ids = sampling.bad_token_ids
    if model.encoder is not None:
        bad_token_ids += tuple((token_id,) for token_id in model.encoder.never_ids)
    return msgspec.structs.replace(
        sampling,
        max_tokens=max_tokens,
        bad_token_ids=bad_token_ids,
        seed=seed,
        ignore_eos=sampling.ignore_eos or request.end_id == NO_END_ID,
        logprobs=0 if chooses_best and sampling.logprobs is None else sampling.logprobs,
    )


def share_weight(
    fair_share: str,
    weights: Mapping[str, float],
    *,
    adapters: Iterable[str],
    tenant: str,
    tenant_weight: float | None = None,
) -> float:
    """Return the weight of a request in the fair share of its engine.

    `fair_share` and `weights` are the settings fair_share and fair_weights; a name without a weight
    has 1. Of several adapters the smallest weight counts; by tenant and adapter it is the product.
    A weight from the key file (`tenant_weight`) takes precedence over the setting.
    """
    by_adapter = min((weights.get(name, 1.0) for name in adapters), default=1.0)
    by_tenant = weights.get(tenant, 1.0) if tenant_weight is None else tenant_weight
    match fair_share:
        case "adapter":
            return by_adapter
        case "tenant":
            return by_tenant
        case "tenant_adapter":
            return by_adapter * by_tenant
        case _:
            return 1.0
