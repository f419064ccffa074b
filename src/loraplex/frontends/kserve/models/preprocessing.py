"""`preprocessing`: a prompt and its words become the tensors that `tensorrt_llm` takes.

Names, types, dimensions and order are those of the TensorRT-LLM backend's repository (version of
May 2025). What only multimodal and encoder-decoder models fill is declared and never comes.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from loraplex.frontends.kserve.models.inputs import Inputs
from loraplex.frontends.kserve.models.kinds import (
    ENCODER_DECODER,
    MULTIMODAL,
    ModelKind,
    OutputSpec,
    or_uint32,
    refused,
    used,
)
from loraplex.frontends.kserve.models.texts import ModelTexts
from loraplex.frontends.kserve.models.triton_model import TritonModel
from loraplex.frontends.kserve.models.words import word_biases
from loraplex.frontends.kserve.tensors import Tensor, numbers

NO_TOKEN = -1
"""Value of end_id and pad_id of a model that has none."""
END_PADDING = -1
"""Padding of the row of word ends."""

_IMAGE_DIMS = (-1, -1, -1, -1)

_INPUTS = (
    used("QUERY", "BYTES", required=True),
    refused("DECODER_QUERY", "BYTES", reason=ENCODER_DECODER, neutral=(b"",)),
    refused("IMAGE_BYTES", "UINT8", _IMAGE_DIMS, reason=MULTIMODAL),
    refused("IMAGE_URL", "BYTES", reason=MULTIMODAL, neutral=(b"",)),
    refused("VIDEO_BYTES", "UINT8", _IMAGE_DIMS, reason=MULTIMODAL),
    or_uint32(used("REQUEST_OUTPUT_LEN", "INT32", required=True)),
    used("BAD_WORDS_DICT", "BYTES", (-1,)),
    used("STOP_WORDS_DICT", "BYTES", (-1,)),
    used("EMBEDDING_BIAS_WORDS", "BYTES", (-1,), field="embedding_bias_words"),
    used("EMBEDDING_BIAS_WEIGHTS", "FP32", (-1,), field="embedding_bias_weights"),
    used("END_ID", "INT32"),
    used("PAD_ID", "INT32"),
    used("PROMPT_TABLE_EXTRA_ID", "UINT64"),
)

_OUTPUTS = (
    OutputSpec("INPUT_ID", "INT32", (-1,)),
    OutputSpec("REQUEST_INPUT_LEN", "INT32"),
    OutputSpec("DECODER_INPUT_ID", "INT32", (-1,)),
    OutputSpec("REQUEST_DECODER_INPUT_LEN", "INT32"),
    OutputSpec("BAD_WORDS_IDS", "INT32", (2, -1)),
    OutputSpec("STOP_WORDS_IDS", "INT32", (2, -1)),
    OutputSpec("EMBEDDING_BIAS", "FP32", (-1,)),
    OutputSpec("REQUEST_OUTPUT_LEN", "INT32", (-1,), other_datatypes=("UINT32",)),
    OutputSpec("OUT_END_ID", "INT32"),
    OutputSpec("OUT_PAD_ID", "INT32"),
    OutputSpec("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", (-1,)),
    OutputSpec("PIXEL_VALUES", "FP16", _IMAGE_DIMS, never_why=MULTIMODAL),
    OutputSpec("ASPECT_RATIO_IDS", "INT64", (-1,), never_why=MULTIMODAL),
    OutputSpec("ASPECT_RATIO_MASK", "INT64", (-1, -1), never_why=MULTIMODAL),
    OutputSpec("CROSS_ATTENTION_MASK", "INT64", (-1, -1, -1), never_why=MULTIMODAL),
    OutputSpec("IMAGE_SIZES", "INT64", (2,), never_why=MULTIMODAL),
    OutputSpec("IS_VIDEO_INPUT", "BOOL", never_why=MULTIMODAL),
    OutputSpec("ATTENTION_MASK", "INT64", (-1,), never_why=MULTIMODAL),
    OutputSpec("IMAGE_GRID_THW", "INT64", (3,), never_why=MULTIMODAL),
    OutputSpec("VISION_INPUT_ID", "INT32", (-1,), never_why=MULTIMODAL),
)

PREPROCESSING = ModelKind(
    name="preprocessing",
    platform="",
    backend="python",
    inputs=_INPUTS,
    outputs=_OUTPUTS,
    takes_text=True,
    ends_by_default=True,
)


def preprocess(model: TritonModel, elements: Sequence[Inputs], texts: ModelTexts) -> list[Tensor]:
    """The outputs of a batch. Raises InvalidTensorError, and as the tokenizer does.

    INPUT_ID is padded on the right, with the pad id, to the longest of the batch.
    """
    adds = model.options.adds_special_tokens
    prompts = [
        texts.encode("".join(inputs.texts("QUERY")), add_special_tokens=adds) for inputs in elements
    ]
    end_ids = [_token_id(inputs, "END_ID", model.card.eos_token_id) for inputs in elements]
    pad_ids = [_token_id(inputs, "PAD_ID", _pad_token_id(model)) for inputs in elements]
    limits = [inputs.integer("REQUEST_OUTPUT_LEN", 0) for inputs in elements]
    longest = max(map(len, prompts))
    padded = [
        prompt + [max(pad_id, 0)] * (longest - len(prompt))
        for prompt, pad_id in zip(prompts, pad_ids, strict=True)
    ]
    return [
        numbers("INPUT_ID", "INT32", padded),
        _column("REQUEST_INPUT_LEN", [len(prompt) for prompt in prompts]),
        _column("DECODER_INPUT_ID", pad_ids),
        _column("REQUEST_DECODER_INPUT_LEN", [1] * len(elements)),
        _word_list("BAD_WORDS", elements, texts),
        _word_list("STOP_WORDS", elements, texts),
        _embedding_bias(model, elements, texts),
        _column("REQUEST_OUTPUT_LEN", limits, model.output_datatype("REQUEST_OUTPUT_LEN")),
        _column("OUT_END_ID", end_ids),
        _column("OUT_PAD_ID", pad_ids),
        *_extra_ids(elements),
    ]


def _token_id(inputs: Inputs, field: str, default: int | None) -> int:
    return inputs.integer(field, NO_TOKEN if default is None else default)


def _pad_token_id(model: TritonModel) -> int | None:
    """The end token pads where the tokenizer has no other for it."""
    card = model.card
    return card.eos_token_id if card.pad_token_id is None else card.pad_token_id


def _column(name: str, values: Sequence[int], datatype: str = "INT32") -> Tensor:
    """Shape [batch, 1]."""
    return numbers(name, datatype, [[value] for value in values])


def _extra_ids(elements: Sequence[Inputs]) -> list[Tensor]:
    """Only if it was sent."""
    arrays = [inputs.array("PROMPT_TABLE_EXTRA_ID") for inputs in elements]
    values = [int(array.flat[0]) for array in arrays if array is not None]
    return [_column("OUT_PROMPT_TABLE_EXTRA_IDS", values, "UINT64")] if values else []


# ---------------------------------------------------------------- words


def _word_list(name: str, elements: Sequence[Inputs], texts: ModelTexts) -> Tensor:
    """The [batch, 2, n] form that `words.split_words` reads; n is 0 if no words were sent.

    Words that have no tokens are left out; if all have none, n is 1 and nothing is in the list.
    """
    field = f"{name}_DICT"
    if not any(inputs.texts(field) for inputs in elements):
        return Tensor.of(f"{name}_IDS", "INT32", np.zeros((len(elements), 2, 0), np.int32))
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
    return numbers(f"{name}_IDS", "INT32", padded)


def _embedding_bias(model: TritonModel, elements: Sequence[Inputs], texts: ModelTexts) -> Tensor:
    """[batch, vocabulary] of the model, or [batch, 0] without words."""
    has_words = any(inputs.texts("embedding_bias_words") for inputs in elements)
    width = model.card.vocab_size if has_words else 0
    biases = np.zeros((len(elements), width), np.float32)
    for row, inputs in zip(biases, elements, strict=True):
        for token_id, bias in word_biases(inputs, texts.encode):
            row[token_id] = bias
    return Tensor.of("EMBEDDING_BIAS", "FP32", biases)
