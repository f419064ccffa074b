"""Models that generate nothing: their outputs are a function of their inputs."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from loraplex.core.errors import (
    InvalidTensorError,
    TokenOutOfVocabularyError,
    UnsupportedFeatureError,
)
from loraplex.frontends.kserve.models.convert import word_biases
from loraplex.frontends.kserve.models.inputs import Inputs
from loraplex.frontends.kserve.models.kinds import (
    LENGTHS,
    POSTPROCESSING,
    PREPROCESSING,
)
from loraplex.frontends.kserve.models.triton_model import ModelTexts, TritonModel
from loraplex.frontends.kserve.tensors import Tensor, numbers, strings

NO_TOKEN = -1
"""Value of end_id and pad_id of a model that has none."""
END_PADDING = -1
"""Padding of the row of word ends."""
_PASSED_THROUGH = ("CUM_LOG_PROBS", "OUTPUT_LOG_PROBS", "CONTEXT_LOGITS", "GENERATION_LOGITS")
"""Each comes back as OUT_ and its name."""
_PADDING = -1
"""Follows a beam that is shorter than another one."""
_INLINE_BYTES = 1 << 14
"""Size of an input that is computed inline: about a millisecond, too short for a thread."""

Computation = Callable[[TritonModel, Sequence[Inputs]], list[Tensor]]


async def compute(model: TritonModel, elements: Sequence[Inputs], num_bytes: int) -> list[Tensor]:
    """The outputs of a batch; num_bytes is the size of its inputs."""
    computation = COMPUTATIONS[model.kind.name]
    if num_bytes <= _INLINE_BYTES:
        return computation(model, elements)
    return await asyncio.to_thread(computation, model, elements)


# ---------------------------------------------------------------- preprocessing


def preprocess(model: TritonModel, elements: Sequence[Inputs]) -> list[Tensor]:
    """The outputs of a batch. Raises InvalidTensorError, and as the tokenizer does.

    INPUT_ID and DECODER_INPUT_ID are padded on the right, with the pad id, to the longest of the
    batch. Where the client sent no DECODER_QUERY, one pad id stands for the model's own beginning.
    """
    adds = model.options.adds_special_tokens
    prompts = [
        model.texts.encode("".join(inputs.texts("QUERY")), add_special_tokens=adds)
        for inputs in elements
    ]
    card = model.card
    end_id = NO_TOKEN if card.eos_token_id is None else card.eos_token_id
    # The end token pads where the tokenizer has no other for it.
    pad_id = end_id if card.pad_token_id is None else card.pad_token_id
    end_ids = [inputs.first("END_ID", end_id) for inputs in elements]
    pad_ids = [inputs.first("PAD_ID", pad_id) for inputs in elements]
    limits = [inputs.first("REQUEST_OUTPUT_LEN", 0) for inputs in elements]
    begun = [
        _decoder_prompt(model, inputs) or [pad]
        for inputs, pad in zip(elements, pad_ids, strict=True)
    ]
    return [
        numbers("INPUT_ID", "INT32", _padded(prompts, pad_ids)),
        _column("REQUEST_INPUT_LEN", [len(prompt) for prompt in prompts]),
        numbers("DECODER_INPUT_ID", "INT32", _padded(begun, pad_ids)),
        _column("REQUEST_DECODER_INPUT_LEN", [len(prompt) for prompt in begun]),
        _word_list("BAD_WORDS_DICT", "BAD_WORDS_IDS", elements, model.texts),
        _word_list("STOP_WORDS_DICT", "STOP_WORDS_IDS", elements, model.texts),
        _embedding_bias(model, elements),
        _column("REQUEST_OUTPUT_LEN", limits, model.output_datatype("REQUEST_OUTPUT_LEN")),
        _column("OUT_END_ID", end_ids),
        _column("OUT_PAD_ID", pad_ids),
        *_extra_ids(elements),
    ]


def _decoder_prompt(model: TritonModel, inputs: Inputs) -> list[int]:
    """Return the tokens of DECODER_QUERY; none if it was not sent.

    Raises UnsupportedFeatureError for a model whose outputs continue the prompt.
    """
    text = "".join(inputs.texts("DECODER_QUERY"))
    if text and model.card.encoder is None:
        raise UnsupportedFeatureError(
            "DECODER_QUERY is what the output of an encoder-decoder model begins with; "
            f"{model.base_model} has no encoder: write it at the end of QUERY",
            param="DECODER_QUERY",
        )
    return model.texts.encode(text, add_special_tokens=False) if text else []


def _padded(rows: Sequence[list[int]], pad_ids: Sequence[int]) -> list[list[int]]:
    longest = max(map(len, rows))
    return [
        row + [max(pad, 0)] * (longest - len(row)) for row, pad in zip(rows, pad_ids, strict=True)
    ]


def _column(name: str, values: Sequence[int], datatype: str = "INT32") -> Tensor:
    """Shape [batch, 1]."""
    return numbers(name, datatype, [[value] for value in values])


def _extra_ids(elements: Sequence[Inputs]) -> list[Tensor]:
    """Only if it was sent."""
    arrays = [inputs.array("PROMPT_TABLE_EXTRA_ID") for inputs in elements]
    values = [int(array.flat[0]) for array in arrays if array is not None]
    return [_column("OUT_PROMPT_TABLE_EXTRA_IDS", values, "UINT64")] if values else []


# ---------------------------------------------------------------- words


def _word_list(field: str, name: str, elements: Sequence[Inputs], texts: ModelTexts) -> Tensor:
    """The [batch, 2, n] form that `sampling.split_words` reads; n is 0 if no words were sent.

    Words that have no tokens are left out; if all have none, n is 1 and nothing is in the list.
    """
    if not any(inputs.texts(field) for inputs in elements):
        return Tensor.of(name, "INT32", np.zeros((len(elements), 2, 0), np.int32))
    words = [
        [texts.encode(word, add_special_tokens=False) for word in inputs.texts(field) if word]
        for inputs in elements
    ]
    rows = [
        (list(itertools.chain(*own)), list(itertools.accumulate(len(w) for w in own if w)))
        for own in words
    ]
    width = max(1, *(len(ids) for ids, _ in rows))
    padded = [
        [ids + [0] * (width - len(ids)), ends + [END_PADDING] * (width - len(ends))]
        for ids, ends in rows
    ]
    return numbers(name, "INT32", padded)


def _embedding_bias(model: TritonModel, elements: Sequence[Inputs]) -> Tensor:
    """[batch, vocabulary] of the model, or [batch, 0] without words."""
    has_words = any(inputs.texts("embedding_bias_words") for inputs in elements)
    width = model.card.vocab_size if has_words else 0
    biases = np.zeros((len(elements), width), np.float32)
    for row, inputs in zip(biases, elements, strict=True):
        for token_id, bias in word_biases(inputs, model.texts.encode):
            row[token_id] = bias
    return Tensor.of("EMBEDDING_BIAS", "FP32", biases)


# ---------------------------------------------------------------- postprocessing


def postprocess(model: TritonModel, elements: Sequence[Inputs]) -> list[Tensor]:
    """The outputs of a batch. Raises InvalidTensorError and TokenOutOfVocabularyError.

    OUTPUT is flat: the sequences of the first element, then those of the next.
    """
    skips = model.options.skips_special_tokens
    completions = [
        model.texts.decode(token_ids, skip_special_tokens=skips)
        for inputs in elements
        for token_ids in _sequences(inputs, model.card.vocab_size)
    ]
    return [strings("OUTPUT", completions), *_passed_through(elements)]


def _sequences(inputs: Inputs, vocab_size: int) -> Iterator[list[int]]:
    """Each row of TOKENS_BATCH, up to its length: what follows is padding."""
    rows, lengths = inputs.array("TOKENS_BATCH"), inputs.array(LENGTHS)
    if rows is not None and LENGTHS not in inputs.tensors:
        lengths = rows.shape[1] - (rows[:, ::-1] != _PADDING).argmax(axis=1)
    num_rows = 0 if rows is None else len(rows)
    num_lengths = 0 if lengths is None else len(lengths)
    if rows is None and lengths is not None and not lengths.any():
        yield from ([] for _ in lengths)  # a last piece of a stream may have no tokens
        return
    if rows is None or lengths is None or num_rows != num_lengths:
        raise InvalidTensorError(
            f"input 'SEQUENCE_LENGTH' has {num_lengths} lengths, but 'TOKENS_BATCH' has "
            f"{num_rows} sequences; each must have one",
            param="SEQUENCE_LENGTH",
        )
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        if length < 0:
            raise InvalidTensorError(
                f"input 'SEQUENCE_LENGTH' has {length}; a length is not negative",
                param="SEQUENCE_LENGTH",
            )
        wrong = next((t for t in row[:length] if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise TokenOutOfVocabularyError(
                f"input 'TOKENS_BATCH' has the token id {wrong}; those of this model are 0 to "
                f"{vocab_size - 1}",
                param="TOKENS_BATCH",
            )
        yield row[:length]


def _passed_through(elements: Sequence[Inputs]) -> list[Tensor]:
    tensors = []
    for name in _PASSED_THROUGH:
        if name in elements[0].tensors:
            arrays = [inputs.own(name).array for inputs in elements]
            tensors.append(Tensor.of(f"OUT_{name}", "FP32", np.stack(arrays)))
    return tensors


COMPUTATIONS: Final[Mapping[str, Computation]] = {
    PREPROCESSING.name: preprocess,
    POSTPROCESSING.name: postprocess,
}
