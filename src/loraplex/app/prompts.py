"""The arguments of the library's `generate`: prompts, and one value for all or one for each."""

import operator
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypedDict

from loraplex.app.answers import Prompt
from loraplex.core.errors import InvalidRequestError
from loraplex.core.retention import KVRetention
from loraplex.core.sampling_params import SamplingParams


class RequestOptions(TypedDict, total=False):
    """What may be said of a request beside its sampling."""

    priority: int
    """Lower is sooner."""
    timeout_seconds: float
    end_id: int
    """The end-of-text token instead of the model's own; -1: none."""
    retention: KVRetention
    """How long its KV is worth keeping."""


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [_as_prompt(items)]
    return [_as_prompt(item) for item in items]


def _as_prompt(item: Any) -> Prompt:
    """Numpy's integers are taken, too."""
    if isinstance(item, str):
        return item
    try:
        return [operator.index(token_id) for token_id in item]
    except TypeError as error:
        raise InvalidRequestError(
            f"a prompt is a text or a list of token ids, got {item!r}", param="prompts"
        ) from error


def params_per_prompt(value: Any, count: int) -> list[SamplingParams]:
    params = per_prompt("sampling_params", value, count)
    for one in params:
        if not isinstance(one, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, or a list of them, got {one!r}",
                param="sampling_params",
            )
    return params


def per_prompt(name: str, value: Any, count: int) -> list[Any]:
    if value is None or isinstance(value, str | Mapping | SamplingParams):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise InvalidRequestError(f"{name} has {len(values)} entries for {count} prompts")
    return values
