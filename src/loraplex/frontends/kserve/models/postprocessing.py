"""`postprocessing`: token ids of `tensorrt_llm` become text.

Names, types, dimensions and order are those of the TensorRT-LLM backend's repository (version of
May 2025); what it passed through in January 2024 is taken, undeclared.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from loraplex.core.errors import InvalidTensorError, TokenOutOfVocabularyError
from loraplex.frontends.kserve.models.inputs import Inputs
from loraplex.frontends.kserve.models.kinds import ModelKind, OutputSpec, used
from loraplex.frontends.kserve.models.texts import ModelTexts
from loraplex.frontends.kserve.models.triton_model import TritonModel
from loraplex.frontends.kserve.tensors import Tensor, strings

LENGTHS = "SEQUENCE_LENGTH"
_PADDING = -1
"""Follows a beam that is shorter than another one."""
_PASSED_THROUGH = (
    ("CUM_LOG_PROBS", (-1,)),
    ("OUTPUT_LOG_PROBS", (-1, -1)),
    ("CONTEXT_LOGITS", (-1, -1)),
    ("GENERATION_LOGITS", (-1, -1, -1)),
)
"""Each comes back as OUT_ and its name."""

POSTPROCESSING = ModelKind(
    name="postprocessing",
    platform="",
    backend="python",
    inputs=(
        used("TOKENS_BATCH", "INT32", (-1, -1), required=True),
        used(LENGTHS, "INT32", (-1,), required=True),
        *(used(name, "FP32", dims, is_declared=False) for name, dims in _PASSED_THROUGH),
    ),
    outputs=(
        OutputSpec("OUTPUT", "BYTES", (-1,)),
        *(
            OutputSpec(f"OUT_{name}", "FP32", dims, is_declared=False)
            for name, dims in _PASSED_THROUGH
        ),
    ),
    takes_text=False,
    ends_by_default=True,
)

POSTPROCESSING_OF_2023 = dataclasses.replace(
    POSTPROCESSING,
    inputs=tuple(
        dataclasses.replace(row, required=row.required and row.name != LENGTHS)
        for row in POSTPROCESSING.inputs
    ),
)
"""Kind of a repository from before December 2023: clients send no lengths, and all tokens count."""


def postprocess(model: TritonModel, elements: Sequence[Inputs], texts: ModelTexts) -> list[Tensor]:
    """The outputs of a batch. Raises InvalidTensorError and TokenOutOfVocabularyError.

    OUTPUT is flat: the sequences of the first element, then those of the next.
    """
    skips = model.options.skips_special_tokens
    completions = [
        texts.decode(token_ids, skip_special_tokens=skips)
        for inputs in elements
        for token_ids in _sequences(inputs, model.card.vocab_size)
    ]
    return [strings("OUTPUT", completions), *_passed_through(elements)]


def _sequences(inputs: Inputs, vocab_size: int) -> Iterator[list[int]]:
    """Each row of TOKENS_BATCH, up to its length: what follows is padding."""
    rows, lengths = inputs.array("TOKENS_BATCH"), inputs.array(LENGTHS)
    if rows is not None and LENGTHS not in inputs:
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
    for name, _ in _PASSED_THROUGH:
        if name in elements[0]:
            arrays = [inputs.sent(name).array for inputs in elements]
            tensors.append(Tensor.of(f"OUT_{name}", "FP32", np.stack(arrays)))
    return tensors
