"""Tensors of TensorRT-LLM's backend for models with an encoder."""

import msgspec
import pytest

from loraplex.core.errors import InvalidTensorError, UnsupportedFeatureError
from loraplex.core.request import GenerateRequest
from loraplex.frontends.kserve.models.computations import preprocess
from loraplex.frontends.kserve.models.convert import RequestHead, convert
from loraplex.frontends.kserve.models.inputs import Inputs, read_inputs
from loraplex.frontends.kserve.models.kinds import (
    ENSEMBLE,
    PREPROCESSING,
    TENSORRT_LLM,
    ModelKind,
)
from loraplex.frontends.kserve.models.triton_model import ModelOptions, ModelTexts, TritonModel
from loraplex.frontends.kserve.tensors import from_values
from loraplex.serving.backend import EncoderFormat
from support.echo_service import EchoService, echo_card
from support.naming import refused

PAD = 250
ENCODER = EncoderFormat(max_tokens=100, first_ids=(2,))


def converted(
    kind: ModelKind, values: dict[str, object], encoder: EncoderFormat | None = ENCODER
) -> GenerateRequest:
    model, inputs = read(kind, values, encoder)
    return convert(inputs, model, RequestHead(request_id=7, model="echo"), {}).request


def read(
    kind: ModelKind, values: dict[str, object], encoder: EncoderFormat | None
) -> tuple[TritonModel, Inputs]:
    """Return the model, and the tensors of one element."""
    given = []
    for name, value in values.items():
        flat = value if isinstance(value, list) else [value]
        row = kind.inputs_by_name[name]
        given.append(from_values(name, row.datatype, [1, len(flat)], flat))
    model = TritonModel(
        name=kind.name,
        kind=kind,
        base_model="echo",
        max_batch_size=1,
        options=ModelOptions(),
        card=msgspec.structs.replace(echo_card("echo"), encoder=encoder, pad_token_id=PAD),
        texts=ModelTexts(EchoService(), "echo"),
    )
    return model, read_inputs(kind, kind.name, given, max_batch_size=1)[0]


def tokens(encoder: EncoderFormat | None = ENCODER, **values: object) -> GenerateRequest:
    core = {"input_ids": [1, 2, 3], "input_lengths": 3, "request_output_len": 5}
    return converted(TENSORRT_LLM, {**core, **values}, encoder)


def test_input_ids_are_the_encoders() -> None:
    request = tokens()
    assert request.prompt == (1, 2, 3)
    assert request.decoder_prompt is None


def test_decoder_input_ids_begin_the_output() -> None:
    assert tokens(decoder_input_ids=[2, 7, 9]).decoder_prompt == (2, 7, 9)
    shorter = tokens(decoder_input_ids=[2, 7, 9], decoder_input_lengths=2)
    assert shorter.decoder_prompt == (2, 7)


def test_one_pad_id_is_what_preprocessing_makes() -> None:
    assert tokens(decoder_input_ids=[PAD]).decoder_prompt is None
    assert tokens(decoder_input_ids=[PAD, 7]).decoder_prompt == (PAD, 7)


def test_models_without_an_encoder_ignore_the_ids() -> None:
    assert tokens(encoder=None, decoder_input_ids=[2, 7]).decoder_prompt is None


def test_the_length_is_checked() -> None:
    with refused(InvalidTensorError, "decoder_input_lengths", 0, 1, param="decoder_input_lengths"):
        tokens(decoder_input_ids=[2, 7], decoder_input_lengths=0)


@pytest.mark.parametrize(("text", "expected"), [("", None), ("deu_Latn", "deu_Latn")])
def test_text_of_the_ensemble(text: str, expected: str | None) -> None:
    request = converted(ENSEMBLE, {"text_input": "hi", "max_tokens": 5, "decoder_text_input": text})
    assert request.prompt == "hi"
    assert request.decoder_prompt == expected


def preprocessed(
    *texts: str | None, encoder: EncoderFormat | None = ENCODER
) -> tuple[list[list[int]], list[list[int]]]:
    """Return DECODER_INPUT_ID and REQUEST_DECODER_INPUT_LEN of a batch; None: nothing is sent."""
    elements = []
    for text in texts:
        sent = {} if text is None else {"DECODER_QUERY": text}
        values = {"QUERY": "hi", "REQUEST_OUTPUT_LEN": 5, **sent}
        model, inputs = read(PREPROCESSING, values, encoder)
        elements.append(inputs)
    made = {tensor.name: tensor.array.tolist() for tensor in preprocess(model, elements)}
    return made["DECODER_INPUT_ID"], made["REQUEST_DECODER_INPUT_LEN"]


def test_text_of_preprocessing_has_no_special_tokens() -> None:
    assert preprocessed("ab") == ([[97, 98]], [[2]])


def test_preprocessing_pads_decoder_prompts() -> None:
    """And what was not sent is one pad id."""
    assert preprocessed("ab", None, "") == ([[97, 98], [PAD, PAD], [PAD, PAD]], [[2], [1], [1]])


def test_models_without_an_encoder_refuse_the_text_of_preprocessing() -> None:
    assert preprocessed("", encoder=None) == ([[PAD]], [[1]])
    with refused(UnsupportedFeatureError, "echo", "QUERY", param="DECODER_QUERY"):
        preprocessed("ab", encoder=None)
