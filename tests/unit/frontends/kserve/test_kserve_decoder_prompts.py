"""Tensors of TensorRT-LLM's backend for models with an encoder."""

import msgspec
import pytest

from loraplex.core.errors import InvalidTensorError
from loraplex.core.request import GenerateRequest
from loraplex.frontends.kserve.models.convert import RequestHead, convert
from loraplex.frontends.kserve.models.inputs import read_inputs
from loraplex.frontends.kserve.models.kinds import ENSEMBLE, TENSORRT_LLM, ModelKind
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
    inputs = read_inputs(kind, kind.name, given, max_batch_size=1)[0]
    return convert(inputs, model, RequestHead(request_id=7, model="echo"), {}).request


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
