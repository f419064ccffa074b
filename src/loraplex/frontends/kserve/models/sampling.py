"""The inputs of one element -> SamplingParams. Pure.

Where an input is missing, the defaults are those of TensorRT-LLM's runtime: without top_k and
top_p the choice is greedy, the seed is 0, the end token cannot be the first token (min_tokens 1);
beams have a length penalty of 0 and end as soon as there are enough of them. A value that
SamplingParams refuses is reported under the name of its tensor.
"""

from typing import Any

from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.errors import InvalidParameterError, InvalidTensorError
from loraplex.core.sampling_params import SamplingParams
from loraplex.frontends.kserve.models.guided import grammar_of
from loraplex.frontends.kserve.models.inputs import Inputs
from loraplex.frontends.kserve.models.words import Tokenize, bad_words, logit_bias, stop_words
from loraplex.serving.backend import ModelCard

_NO_RESET_ID = -1
_LOOKAHEAD = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")

_FIELDS = {
    "stop": "stop_words",
    "stop_token_sequences": "stop_words",
    "bad_token_ids": "bad_words",
    "logit_bias": "embedding_bias",
    "return_logits": "return_generation_logits",
}
"""Where SamplingParams has another word for one of our fields."""


def sampling_params(
    inputs: Inputs, card: ModelCard, end_id: int | None, tokenize: Tokenize
) -> SamplingParams:
    """Raises InvalidTensorError and InvalidParameterError."""
    top_k = inputs.integer("top_k", 0)
    top_p = inputs.number("top_p", 0.0)
    is_greedy = top_k == 0 and top_p <= 0.0
    stop = stop_words(inputs, card)
    ends_at_eos = end_id is not None and end_id == card.eos_token_id
    end_ids = () if end_id is None or ends_at_eos else (end_id,)
    sampling = SamplingParams(
        max_tokens=inputs.integer("max_tokens", 0),
        min_tokens=inputs.integer("min_tokens", 1),
        temperature=inputs.number("temperature", 1.0),
        top_k=1 if is_greedy else top_k,
        top_p=1.0 if top_p <= 0.0 else top_p,
        stop=stop.texts,
        stop_token_ids=end_ids,
        stop_token_sequences=stop.sequences,
        include_stop_in_output=stop.has_any,
        ignore_eos=not ends_at_eos,
        logprobs=0 if inputs.flag("returns_log_probs") else None,
        return_logits=inputs.flag("return_generation_logits"),
        return_prompt_logits=inputs.flag("return_context_logits"),
        logit_bias=logit_bias(inputs, card, tokenize),
        grammar=grammar_of(inputs),
        num_draft_tokens=_num_draft_tokens(inputs),
        **bad_words(inputs, card),
        **_top_p_decay(inputs),
        **_penalties(inputs),
        **_sequences(inputs),
    )
    _validate(inputs, sampling)
    return sampling


def _top_p_decay(inputs: Inputs) -> dict[str, Any]:
    reset_id = inputs.integer("top_p_reset_id", _NO_RESET_ID)
    return {
        "top_p_decay": inputs.number("top_p_decay", 1.0),
        "top_p_min": inputs.number("top_p_min", 1e-6),
        "top_p_reset_id": None if reset_id == _NO_RESET_ID else reset_id,
    }


def _penalties(inputs: Inputs) -> dict[str, Any]:
    return {
        "repetition_penalty": inputs.number("repetition_penalty", 1.0),
        "presence_penalty": inputs.number("presence_penalty", 0.0),
        "frequency_penalty": inputs.number("frequency_penalty", 0.0),
        "no_repeat_ngram_size": inputs.integer("no_repeat_ngram_size", 0),
        "seed": inputs.integer("seed", 0),
    }


def _sequences(inputs: Inputs) -> dict[str, Any]:
    """Of beams, all come back unless num_return_sequences says how many."""
    width = inputs.integer("beam_width", 1)
    if width == 1:
        return {"n": inputs.integer("n", 1)}
    stops_early = inputs.flag("early_stopping") if "early_stopping" in inputs else True
    beam = BeamSearch(
        width=width,
        length_penalty=inputs.number("length_penalty", 0.0),
        diversity_rate=inputs.number("beam_search_diversity_rate", 0.0),
        early_stopping=EarlyStopping.AT_ONCE if stops_early else EarlyStopping.WHEN_UNLIKELY,
    )
    return {"n": inputs.integer("n", max(width, 1)), "beam": beam}


def _num_draft_tokens(inputs: Inputs) -> int | None:
    """Of the client, or as many as lookahead's n-grams would give: all tokens but the first.

    TensorRT-LLM guesses by Jacobi iteration, we by prompt lookup: neither changes a token.
    """
    sent = [name for name in _LOOKAHEAD if inputs.array(name) is not None]
    if not sent:
        array = inputs.array("num_draft_tokens")
        return None if array is None else int(array.flat[0])
    if len(sent) < len(_LOOKAHEAD):
        missing = next(name for name in _LOOKAHEAD if name not in sent)
        raise InvalidTensorError(
            f"lookahead decoding needs all of {', '.join(_LOOKAHEAD)}; input '{missing}' is "
            "missing",
            param=missing,
        )
    for name in _LOOKAHEAD:
        if inputs.integer(name, 0) < 1:
            raise InvalidTensorError(
                f"input '{name}' is {inputs.integer(name, 0)}; it must be at least 1", param=name
            )
    return inputs.integer("lookahead_ngram_size", 1) - 1


def _validate(inputs: Inputs, sampling: SamplingParams) -> None:
    try:
        sampling.validate()
    except InvalidParameterError as error:
        name = inputs.kind.input_of(_FIELDS.get(error.param or "", error.param or ""))
        raise InvalidParameterError(f"input '{name}': {error.message}", param=name) from None
