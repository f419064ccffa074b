"""Fields that a client of the Responses API may send, and that are refused or have no effect."""

from loraplex.core.support import Feature, Support
from loraplex.frontends.openai.unsupported import EMPTY, OFF, RefusedField
from loraplex.frontends.openai.unsupported import REFUSED as OF_CHAT

_CONVERSATION = "use previous_response_id, or send the whole conversation as input"

REFUSED = (
    RefusedField("conversation", EMPTY, _CONVERSATION),
    RefusedField("prompt", EMPTY, "templates are not kept: send instructions and input"),
    RefusedField("context_management", EMPTY, "use truncation"),
    RefusedField("moderation", EMPTY, "nothing is moderated here"),
    RefusedField("background_options", EMPTY, "use stream"),
    RefusedField("access_programs", EMPTY),
    RefusedField("image", EMPTY, "only text is served"),
    # what chats have, and responses call otherwise
    RefusedField("messages", EMPTY, "use input"),
    RefusedField("max_completion_tokens", EMPTY, "use max_output_tokens"),
    RefusedField("reasoning_effort", EMPTY, "use reasoning.effort"),
    RefusedField("logprobs", OFF, "use include: ['message.output_text.logprobs']"),
    RefusedField("n", (None, 1), "a response is one output; use /v1/chat/completions"),
    RefusedField("best_of", (None, 1), "use /v1/chat/completions"),
    RefusedField("use_beam_search", OFF, "use /v1/chat/completions"),
    RefusedField("prompt_logprobs", EMPTY, "use /v1/chat/completions"),
)

WITHOUT_EFFECT = (
    Feature("client_metadata", Support.NO_EFFECT, "nothing is stored"),
    Feature("prompt_cache_options", Support.NO_EFFECT, "equal beginnings are found by themselves"),
    Feature("prompt_cache_retention", Support.NO_EFFECT, "as prompt_cache_options"),
)

BY_FIELD = {refused.field: refused for refused in (*OF_CHAT, *REFUSED)}
"""What is known and not in the schema, of chats too."""

KNOWN = {*BY_FIELD, *(feature.name for feature in WITHOUT_EFFECT)}
"""Fields that are not in the schema and that a client may send."""

RENAMED = {
    "max_tokens": "use max_output_tokens",
    "response_format": "use text.format",
}
"""Fields of the shared schema that have another name here."""
