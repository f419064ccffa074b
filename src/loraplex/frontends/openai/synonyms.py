"""Fields that mean the same, because several servers are replaced at once."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from loraplex.core.errors import InvalidParameterError
from loraplex.frontends.openai.schema import SamplingBody
from loraplex.frontends.openai.structured import constraint_field

SYNONYMS: Mapping[str, str] = MappingProxyType(
    {
        "ignore_eos": "ignore_eos_token",
        "include_stop_str_in_output": "no_stop_trim",
        "request_id": "rid",
    }
)
"""Our name (vLLM's): the other one (LoRAX's or SGLang's)."""


def value_of(body: SamplingBody, field: str) -> Any:
    """Value of the field or of its synonym; None if neither is given.

    Raises InvalidParameterError if they differ.
    """
    value, other_name = getattr(body, field), SYNONYMS.get(field)
    other = None if other_name is None else getattr(body, other_name)
    if value is not None and other is not None and value != other:
        raise InvalidParameterError(
            f"{field} and {other_name} mean the same, and are {value!r} and {other!r}; "
            "give one of them",
            param=other_name,
        )
    return other if value is None else value


def sent_names(body: SamplingBody) -> Mapping[str, str]:
    """Return the fields of this body by the names of our parameters, for errors."""
    names = {"top_p_reset_id": "top_p_reset_ids"}
    if field := constraint_field(body):
        names["grammar"] = field
    if getattr(body, "max_completion_tokens", None) is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names
