"""One element of a batch -> a GenerateRequest, and how its answer is to look.

Pure. Where an input is missing, the defaults are those of TensorRT-LLM's runtime: without top_k and
top_p the choice is greedy, the seed is 0, and the end token cannot be the first token
(min_tokens 1). A value that SamplingParams refuses is reported under the name of its tensor.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence

import numpy as np

from loraplex.adapters.staging import RequestTensor
from loraplex.core.adapter import AdapterChoice, ByTaskId
from loraplex.core.errors import InvalidParameterError, InvalidTensorError
from loraplex.core.request import GenerateRequest, RequestId
from loraplex.core.sampling_params import SamplingParams
from loraplex.frontends.adapter_choices import read_choices
from loraplex.frontends.kserve.messages import Parameter
from loraplex.frontends.kserve.models.inputs import Inputs
from loraplex.frontends.kserve.tensors import Array, Tensor
from loraplex.serving.backend import ModelCard

Detokenize = Callable[[Sequence[int]], str]

NO_END_ID = -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InlineAdapter:
    """An adapter that came with the request; task_id is what the client calls it, if anything."""

    task_id: int | None
    weights: RequestTensor
    config: RequestTensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request for the backend, and what its client wants to see of the answer."""

    request: GenerateRequest
    """With an inline adapter its `adapters` are empty until the backend has a key for it."""
    inline_adapter: InlineAdapter | None = None
    end_token_ids: frozenset[int]
    """They end the answer and are never shown."""
    is_streamed: bool
    excludes_input: bool
    returns_log_probs: bool
    returns_num_input_tokens: bool
    returns_num_output_tokens: bool


def convert(
    inputs: Inputs,
    card: ModelCard,
    request_id: RequestId,
    *,
    client_request_id: str = "",
    adapters: Parameter = "",
    timeout_seconds: float | None = None,
    detokenize: Detokenize,
) -> Generation:
    """Raises InvalidTensorError, InvalidParameterError and what `detokenize` raises.

    adapters: the request's parameter of this name, a JSON text (see frontends.adapter_choices).
    """
    end_id = _end_id(inputs, card)
    sampling = _sampling(inputs, card, end_id, detokenize)
    _validate(inputs, sampling)
    inline_adapter = _inline_adapter(inputs)
    request = GenerateRequest(
        request_id=request_id,
        model=card.name,
        prompt=_prompt(inputs),
        sampling=sampling,
        adapters=_adapters(inputs, adapters),
        client_request_id=client_request_id,
        timeout_seconds=timeout_seconds,
    )
    eos = () if card.eos_token_id is None or sampling.ignore_eos else (card.eos_token_id,)
    return Generation(
        request=request,
        inline_adapter=inline_adapter,
        end_token_ids=frozenset((*eos, *(() if end_id is None else (end_id,)))),
        is_streamed=inputs.flag("is_streamed"),
        excludes_input=inputs.flag("excludes_input"),
        returns_log_probs=inputs.flag("returns_log_probs"),
        returns_num_input_tokens=inputs.flag("returns_num_input_tokens"),
        returns_num_output_tokens=inputs.flag("returns_num_output_tokens"),
    )


def _adapters(inputs: Inputs, parameter: Parameter) -> tuple[AdapterChoice, ...]:
    """Of the parameter, or the one of lora_task_id; none yet for an adapter that came along."""
    choices = _parsed(parameter)
    sent = [f for f in ("lora_task_id", "lora_weights") if inputs.tensor(f) is not None]
    if choices and sent:
        raise InvalidParameterError(
            f"the parameter 'adapters' and the input '{sent[0]}' both name an adapter; put all "
            "of them into 'adapters'",
            param="adapters",
        )
    task_id = _task_id(inputs)
    if task_id is None or "lora_weights" in sent:
        return choices
    return (AdapterChoice(ByTaskId(task_id)),)


def _parsed(parameter: Parameter) -> tuple[AdapterChoice, ...]:
    if parameter == "":
        return ()
    try:
        return read_choices(json.loads(str(parameter)))
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError(
            f"the parameter 'adapters' must be a JSON text, as '[{{\"name\": \"fr\"}}]': {error}",
            param="adapters",
        ) from None


def _task_id(inputs: Inputs) -> int | None:
    array = inputs.array("lora_task_id")
    return None if array is None else int(array.flat[0])


def _inline_adapter(inputs: Inputs) -> InlineAdapter | None:
    """TensorRT-LLM's sentence says lora_keys: the old name of lora_config."""
    weights, config = inputs.tensor("lora_weights"), inputs.tensor("lora_config")
    if weights is None and config is None:
        return None
    if weights is None or config is None:
        missing = "lora_weights" if weights is None else "lora_config"
        raise InvalidTensorError(
            "Request for LoRA inference must have both lora_weights and lora_keys; input "
            f"'{missing}' is missing or empty",
            param=missing,
        )
    return InlineAdapter(
        task_id=_task_id(inputs),
        weights=_request_tensor(weights),
        config=_request_tensor(config),
    )


def _request_tensor(tensor: Tensor) -> RequestTensor:
    """A view of the tensor's bytes, not a copy."""
    data = np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8).data
    return RequestTensor(tensor.datatype, tensor.shape, data)


# ---------------------------------------------------------------- the prompt


def _prompt(inputs: Inputs) -> str | tuple[int, ...]:
    if inputs.kind.takes_text:
        text = "".join(inputs.texts("text_input"))
        if not text:
            raise InvalidTensorError(
                "input 'text_input' is empty; it must hold at least one character",
                param="text_input",
            )
        return text
    return _prompt_ids(inputs)


def _prompt_ids(inputs: Inputs) -> tuple[int, ...]:
    """input_ids up to input_lengths: what follows is padding."""
    array = inputs.array("input_ids")
    if array is None:
        raise InvalidTensorError(
            "input 'input_ids' is empty; it must hold at least one token id", param="input_ids"
        )
    length = inputs.integer("input_lengths", array.size)
    if not 1 <= length <= array.size:
        raise InvalidTensorError(
            f"input 'input_lengths' is {length}, but 'input_ids' has {array.size} token ids; it "
            f"must be in [1, {array.size}]",
            param="input_lengths",
        )
    return tuple(array.tolist()[:length])


# ---------------------------------------------------------------- sampling


def _sampling(
    inputs: Inputs, card: ModelCard, end_id: int | None, detokenize: Detokenize
) -> SamplingParams:
    top_k = inputs.integer("top_k", 0)
    top_p = inputs.number("top_p", 0.0)
    is_greedy = top_k == 0 and top_p <= 0.0
    words, word_ids = _stop_words(inputs, detokenize)
    ends_at_eos = end_id is not None and end_id == card.eos_token_id
    end_ids = () if end_id is None or ends_at_eos else (end_id,)
    return SamplingParams(
        max_tokens=inputs.integer("max_tokens", 0),
        min_tokens=inputs.integer("min_tokens", 1),
        n=inputs.integer("n", 1),
        temperature=inputs.number("temperature", 1.0),
        top_k=1 if is_greedy else top_k,
        top_p=1.0 if top_p <= 0.0 else top_p,
        repetition_penalty=inputs.number("repetition_penalty", 1.0),
        presence_penalty=inputs.number("presence_penalty", 0.0),
        frequency_penalty=inputs.number("frequency_penalty", 0.0),
        seed=inputs.integer("seed", 0),
        stop=words,
        stop_token_ids=(*end_ids, *word_ids),
        include_stop_in_output=bool(words or word_ids),
        ignore_eos=not ends_at_eos,
        logprobs=0 if inputs.flag("returns_log_probs") else None,
    )


def _end_id(inputs: Inputs, card: ModelCard) -> int | None:
    """The token that ends the answer; None: only the length does."""
    default = card.eos_token_id if inputs.kind.ends_by_default else None
    end_id = inputs.integer("end_id", NO_END_ID if default is None else default)
    if end_id == NO_END_ID:
        return None
    if not 0 <= end_id < card.vocab_size:
        raise InvalidTensorError(
            f"input 'end_id' is {end_id}; it must be a token id in [0, {card.vocab_size - 1}], or "
            f"{NO_END_ID} for none",
            param="end_id",
        )
    return end_id


def _validate(inputs: Inputs, sampling: SamplingParams) -> None:
    try:
        sampling.validate()
    except InvalidParameterError as error:
        name = inputs.kind.input_of(_FIELDS.get(error.param or "", error.param or ""))
        raise InvalidParameterError(f"input '{name}': {error.message}", param=name) from None


_FIELDS = {"stop": "stop_words"}
"""Where SamplingParams has another word for one of our fields."""


# ---------------------------------------------------------------- stop words


def _stop_words(inputs: Inputs, detokenize: Detokenize) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(stop strings, stop token ids).

    A word of one token stops at that very token. A word of several tokens is matched as text: the
    model may spell it with other tokens, which is where the original misses it.
    """
    if inputs.kind.takes_text:
        return tuple(text for text in inputs.texts("stop_words") if text), ()
    array = inputs.array("stop_words")
    words = [] if array is None else split_words("stop_words_list", array)
    texts = (detokenize(word) for word in words if len(word) > 1)
    return tuple(text for text in texts if text), tuple(w[0] for w in words if len(w) == 1)


def split_words(name: str, array: Array) -> list[tuple[int, ...]]:
    """The words of a [2, n] word list: row 0 their token ids, row 1 where each word ends.

    The ends are cumulative and padded with -1; the ids are padded with 0.
    """
    token_ids, ends = array.tolist()
    words = []
    start = 0
    for end in ends:
        if end == -1:
            break
        if not start < end <= len(token_ids):
            raise InvalidTensorError(
                f"input '{name}': row 1 must hold increasing word ends in [1, {len(token_ids)}], "
                f"padded with -1; got {ends}",
                param=name,
            )
        words.append(tuple(token_ids[start:end]))
        start = end
    return words
