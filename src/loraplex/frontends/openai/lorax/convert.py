"""Conversion of LoRAX's body to a completion's body."""

from typing import Any, Final

from loraplex.core.errors import UnsupportedFeatureError
from loraplex.frontends.openai.body import validated
from loraplex.frontends.openai.lorax.schema import Parameters
from loraplex.frontends.openai.schema import CompletionBody

_SAME: Final = (
    *("adapter_id", "best_of", "temperature", "top_k", "top_p", "repetition_penalty", "seed"),
    *("stop", "ignore_eos_token", "response_format"),
)
RENAMED: Final = {"max_tokens": "max_new_tokens", "truncate_prompt_tokens": "truncate"}
"""Our name: LoRAX's."""
REFUSED: Final = {
    "merged_adapters": "use adapters of /v1/completions, each with a scale",
    "typical_p": "use top_p",
    "watermark": "no text is marked",
}
"""What to do instead of a field that is not served."""
_HARMLESS: Final = (None, False)


def completion_body(prompt: str, parameters: Parameters, *, shows_tokens: bool) -> CompletionBody:
    """Raises InvalidParameterError for a value of another type, UnsupportedFeatureError for a field
    that is not served."""
    _refuse(parameters)
    fields: dict[str, Any] = {name: getattr(parameters, name) for name in _SAME}
    fields |= {ours: getattr(parameters, name) for ours, name in RENAMED.items()}
    if not _samples(parameters):
        fields["temperature"] = 0.0
    if shows_tokens:
        fields["logprobs"] = parameters.return_k_alternatives or 0
    if parameters.decoder_input_details:
        fields["prompt_logprobs"] = 0
    return validated(
        CompletionBody,
        fields
        | {
            "prompt": prompt,
            "include_stop_str_in_output": True,
            "add_special_tokens": not parameters.apply_chat_template,
        },
    )


def _samples(parameters: Parameters) -> bool:
    given = (parameters.temperature, parameters.top_k, parameters.top_p)
    return bool(parameters.do_sample) or any(value is not None for value in given)


def _refuse(parameters: Parameters) -> None:
    for name, value in (parameters.model_extra or {}).items():
        if name in REFUSED and value not in _HARMLESS:
            raise UnsupportedFeatureError(f"{name} is not supported; {REFUSED[name]}", param=name)
