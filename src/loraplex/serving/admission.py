"""From what a client asked for to what an engine is told: limits, defaults, the seed, the salt.

Pure functions; everything that can be known to be wrong with a request beforehand is said here.
"""

import math
import secrets
from collections.abc import Sequence

import msgspec

from loraplex.core.adapter import AdapterUse, LoadPolicy
from loraplex.core.errors import (
    InvalidParameterError,
    InvalidRequestError,
    PromptTooLongError,
    TokenOutOfVocabularyError,
)
from loraplex.core.principal import Principal
from loraplex.core.request import EngineRequest, GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.memory.kv_salt import kv_salt
from loraplex.serving.backend import ModelCard

_UINT64 = 2**64
_LONGEST_TIMEOUT_SECONDS = 1e8
"""Three years. What is longer is as good as none, and may be too large for a clock."""


def admit(
    request: GenerateRequest,
    prompt_token_ids: Sequence[int],
    *,
    model: ModelCard,
    eos_token_ids: tuple[int, ...],
    adapters: tuple[AdapterUse, ...],
    principal: Principal,
    now_ns: int,
) -> EngineRequest:
    """Check a tokenized request against its model. Raises RequestErrors."""
    request.sampling.validate()
    check_prompt(prompt_token_ids, model)
    _check_ids("stop_token_ids", request.sampling.stop_token_ids, model)
    for adapter in adapters:
        if not math.isfinite(adapter.scale):
            raise InvalidParameterError(f"an adapter's scale must be finite, got {adapter.scale}")
    return EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=_complete(request.sampling, len(prompt_token_ids), model),
        eos_token_ids=eos_token_ids,
        adapters=adapters,
        kv_salt=kv_salt(
            model.name,
            model.kv_dtype,
            [(adapter.digest, adapter.scale) for adapter in adapters],
            principal.tenant,
        ),
        tenant=principal.tenant,
        priority=request.priority,
        arrival_ns=now_ns,
        deadline_ns=_deadline_ns(request.timeout_seconds, now_ns),
        requires_resident=request.load_policy is LoadPolicy.NEVER,
    )


def check_prompt(token_ids: Sequence[int], model: ModelCard) -> None:
    """Raise unless there is a prompt, of known tokens, with room for one more."""
    if not token_ids:
        raise InvalidRequestError("the prompt is empty: give at least one token", param="prompt")
    if len(token_ids) >= model.max_model_len:
        raise PromptTooLongError(
            f"the prompt has {len(token_ids)} tokens; model {model.name!r} takes at most "
            f"{model.max_model_len - 1} and one of output (max_model_len {model.max_model_len})",
            param="prompt",
        )
    _check_ids("prompt", token_ids, model)


def _check_ids(param: str, token_ids: Sequence[int], model: ModelCard) -> None:
    if not token_ids:
        return
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < model.vocab_size:
            raise TokenOutOfVocabularyError(
                f"{param}: token id {token_id} is out of the vocabulary of model {model.name!r}, "
                f"which is 0 to {model.vocab_size - 1}",
                param=param,
            )


def _complete(sampling: SamplingParams, num_prompt_tokens: int, model: ModelCard) -> SamplingParams:
    """Set max_tokens and seed, so that a replay after a crash is the same request."""
    room = model.max_model_len - num_prompt_tokens
    max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
    if max_tokens > room:
        raise PromptTooLongError(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}: together "
            f"more than the {model.max_model_len} of model {model.name!r}; ask for at most {room}",
            param="max_tokens",
        )
    if sampling.min_tokens > max_tokens:
        raise PromptTooLongError(
            f"the prompt has {num_prompt_tokens} tokens and min_tokens is {sampling.min_tokens}: "
            f"together more than the {model.max_model_len} of model {model.name!r}",
            param="min_tokens",
        )
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed % _UINT64
    return msgspec.structs.replace(sampling, max_tokens=max_tokens, seed=seed)


def _deadline_ns(timeout_seconds: float | None, now_ns: int) -> int | None:
    if timeout_seconds is None or timeout_seconds > _LONGEST_TIMEOUT_SECONDS:
        return None
    if not timeout_seconds > 0:  # true for NaN, too
        raise InvalidParameterError(
            f"the timeout must be more than 0 seconds, got {timeout_seconds:g}", param="timeout"
        )
    return now_ns + int(timeout_seconds * 1e9)
