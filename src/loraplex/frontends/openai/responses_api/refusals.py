"""Fields that a client of the Responses API may send, and that are refused or have no effect."""

from typing import Any

from loraplex.core.support import Feature, Support
from loraplex.frontends.openai.unsupported import REFUSED as OF_CHAT
from loraplex.frontends.openai.unsupported import Refused

_EMPTY: tuple[Any, ...] = (None, {}, [], "")
_CONVERSATION = "use previous_response_id, or send the whole conversation as input"

REFUSED = (
    Refused("conversation", _EMPTY, _CONVERSATION),
    Refused("prompt", _EMPTY, "templates are not kept: send instructions and input"),
    Refused("context_management", _EMPTY, "use truncation"),
    Refused("moderation", _EMPTY, "nothing is moderated here"),
    Refused("background_options", _EMPTY, "use stream"),
    Refused("access_programs", _EMPTY),
    Refused("image", _EMPTY, "only text is served"),
    # what chats have, and responses call otherwise
    Refused("messages", _EMPTY, "use input"),
    Refused("max_completion_tokens", _EMPTY, "use max_output_tokens"),
    Refused("reasoning_effort", _EMPTY, "use reasoning.effort"),
    Refused("logprobs", (None, False), "use include: ['message.output_text.logprobs']"),
    Refused("n", (None, 1), "a response is one answer; use /v1/chat/completions"),
    Refused("best_of", (None, 1), "use /v1/chat/completions"),
    Refused("use_beam_search", (None, False), "use /v1/chat/completions"),
    Refused("prompt_logprobs", _EMPTY, "use /v1/chat/completions"),
)

WITHOUT_EFFECT = (
    Feature("prompt_cache_options", Support.NO_EFFECT, "equal beginnings are found by themselves"),
    Feature("prompt_cache_retention", Support.NO_EFFECT, "as prompt_cache_options"),
)

BY_FIELD = {refused.field: refused for refused in (*OF_CHAT, *REFUSED)}
"""What is known and not in the schema, of chats too."""

RENAMED = {
    "max_tokens": "use max_output_tokens",
    "response_format": "use text.format",
}
"""In the schema of all that generates, and called otherwise here."""
