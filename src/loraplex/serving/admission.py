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
from loraplex.core.task import Generate
from loraplex.memory.kv_salt import kv_salt
from loraplex.serving.backend import ModelCard

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
) -> EngineRequest:
    """Return a checked and tokenized request as its engine gets it. Raises RequestErrors."""
    task = request.task
    _check_length(prompt_token_ids, model, num_new_tokens=int(isinstance(task, Generate)))
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
) -> Sequence[int]:
    """Return what the request's truncation leaves of its prompt.

    Raises InvalidParameterError for a number of tokens below 1.
    """
    most = truncation.max_tokens
    if most is None:
        is_generated = isinstance(request.task, Generate)
        most = model.max_model_len - (request.sampling.max_tokens or 1 if is_generated else 0)
        if model.max_input_len is not None:
            most = min(most, model.max_input_len)
    if type(most) is not int or most < 1:
        raise InvalidParameterError(
            f"truncate_prompt_tokens leaves {most} tokens of the prompt; at least 1 is needed",
            param="truncate_prompt_tokens",
        )
    is_left = truncation.side is TruncationSide.LEFT
    return token_ids[-most:] if is_left else token_ids[:most]


def _check_length(token_ids: Sequence[int], model: ModelCard, num_new_tokens: int) -> None:
    """Raise unless there is a prompt with space for so many more tokens (0 or 1)."""
    if not token_ids:
        raise InvalidRequestError("the prompt is empty: give at least one token", param="prompt")
    if len(token_ids) + num_new_tokens > model.max_model_len:
        of_output = " and one of output" if num_new_tokens else ""
        raise PromptTooLongError(
            f"the prompt has {len(token_ids)} tokens; model {model.name!r} takes at most "
            f"{model.max_model_len - num_new_tokens}{of_output} (max_model_len "
            f"{model.max_model_len})",
            param="prompt",
        )
    if model.max_input_len is not None and len(token_ids) > model.max_input_len:
        # TensorRT-LLM's words: clients know them.
        raise PromptTooLongError(
            f"Prompt length ({len(token_ids)}) exceeds maximum input length "
            f"({model.max_input_len}) of model {model.name!r}: see max_input_len",
            param="prompt",
        )


def _check_ids(request: GenerateRequest, prompt: Sequence[int], model: ModelCard) -> None:
    """Raise TokenOutOfVocabularyError for the first id that the model does not have."""
    ids: dict[str, Sequence[int]] = {"prompt": prompt}
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
    for param, token_ids in ids.items():
        for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
            if not 0 <= token_id < model.vocab_size:
                raise TokenOutOfVocabularyError(
                    f"{param}: token id {token_id} is out of the vocabulary of model "
                    f"{model.name!r}, which is 0 to {model.vocab_size - 1}",
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
    return msgspec.structs.replace(
        sampling,
        max_tokens=max_tokens,
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
