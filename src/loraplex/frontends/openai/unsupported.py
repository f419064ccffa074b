"""Served or refused by name: the fields that clients of OpenAI, vLLM and llgtrt may send and that
we do not serve. A value that asks for nothing (null, an empty list, the default) is let through.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from loraplex.core.errors import InvalidParameterError, UnsupportedFeatureError
from loraplex.frontends.openai.schema import Body


class Refused(NamedTuple):
    """A field, the values that ask for nothing, and what to do instead."""

    field: str
    harmless: tuple[Any, ...] = ()
    advice: str = ""


_EMPTY: tuple[Any, ...] = (None, {}, [], "")

REFUSED = (
    Refused("suffix", _EMPTY, "put the text after the gap into the prompt"),
    Refused("tools", _EMPTY),
    Refused("tool_choice", (*_EMPTY, "none", "auto")),
    Refused("functions", _EMPTY),
    Refused("function_call", (*_EMPTY, "none", "auto")),
    Refused("modalities", (*_EMPTY, ["text"]), "only ['text'] is served"),
    Refused("audio", _EMPTY),
    Refused("prediction", _EMPTY),
    Refused("prompt_embeds", _EMPTY),
    Refused("truncate_prompt_tokens", (None,), "send a prompt that fits"),
    Refused("structural_tag", _EMPTY, "use response_format"),
    Refused("guided_whitespace_pattern", _EMPTY, "write the white space into a guided_grammar"),
    Refused("logits_processors", _EMPTY, "use logit_bias, allowed_token_ids or bad_words"),
    Refused("chat_template", _EMPTY, "the template of the served model is used"),
    Refused("continue_final_message", (None, False)),
    Refused("documents", _EMPTY),
    Refused("return_expanded_prompt", (None, False), "POST /tokenize shows the tokens of a prompt"),
)


def refuse_unsupported(fields: Mapping[str, Any] | None) -> None:
    """Raise UnsupportedFeatureError for the first field (of those not in the schema) that we know
    and do not serve, unless its value asks for nothing."""
    for refused in REFUSED:
        if fields and refused.field in fields and not _is_harmless(fields[refused.field], refused):
            advice = f"; {refused.advice}" if refused.advice else ""
            raise UnsupportedFeatureError(
                f"{refused.field} is not supported{advice}", param=refused.field
            )


def refuse_unknown(body: Body) -> None:
    """Raise InvalidParameterError for the first field that is not in the schema: where a misspelt
    field must not be a request without it."""
    for field in body.model_extra or {}:
        known = ", ".join(type(body).model_fields)
        raise InvalidParameterError(f"there is no field {field!r}; known are {known}", param=field)


def _is_harmless(value: Any, refused: Refused) -> bool:
    # 0 == False in Python: a JSON 0 is not the false that is let through.
    return any(type(value) is type(harmless) and value == harmless for harmless in refused.harmless)
