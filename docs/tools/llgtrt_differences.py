"""Where `loraplex compat llgtrt` does not do as llgtrt, and --llgtrt-compat does: a row each."""

from typing import Final, NamedTuple

from loraplex.core.support import Feature, Section


class Difference(NamedTuple):
    name: str
    llgtrts: str
    ours: str


DIFFERENCES: Final = (
    Difference("max_tokens of a chat", "16", "what the context length leaves"),
    Difference("object", "text_completion, of a chat too", "chat.completion and its chunk"),
    Difference("id", "cmpl- and a UUID", "cmpl- or chatcmpl-, and the request id"),
    Difference("system_fingerprint", "null", "identifies the weights used"),
    Difference("expanded_prompt", "null if it was not requested", "absent then"),
    Difference("usage of a stream", "in every chunk", "in a last chunk, if requested"),
    Difference("role in a stream", "in every chunk", "in the first one, which has no text"),
    Difference("errors", '500, {"error": "TEXT"}', "400, 401, 404 and so on, OpenAI's object"),
    Difference("errors in a stream", "status_code and message", "OpenAI's object"),
    Difference("bodies that cannot be read", "400, 415 or 422, plain text", "400, OpenAI's object"),
    Difference("a missing or wrong key", "401, no body; also required on health routes",
               "401, OpenAI's object; /v1/health/live and ready are open"),
    Difference("model", "required", "may be absent"),
    Difference("stop", "a list only", "a string or a list"),
    Difference("roles", "system, user, assistant, tool", "developer, too"),
    Difference("prompt", "one string", "strings, token ids, lists of them"),
    Difference("logprobs of a completion", "refused", "served"),
    Difference("best_of", "1 only", "served"),
    Difference("echo", "refused", "served"),
    Difference("logit_bias", "refused", "served"),
    Difference("top_logprobs", "at most 1", "at most 20"),
    Difference("tool_choice", "auto, none, required", "a named function, too"),
    Difference("tool calls", "plain content", "tool_calls of the message"),
    Difference("special tokens of an output", "shown, such as <|python_tag|>", "skipped"),
    Difference("tojson of a chat template", "indents by 4 by default",
               "one line, as in transformers"),
    Difference("unready", "500 of live and model; ready is always 200, as the port opens when "
               "the model is loaded", "503; ready returns the reason"),
)  # fmt: skip


def sections() -> tuple[Section, ...]:
    """Return the rows of the documentation."""
    rows = tuple(Feature(d.name, note=f"{d.ours}; there: {d.llgtrts}") for d in DIFFERENCES)
    return (Section("Differences", rows),)
