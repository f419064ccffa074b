import re

import numpy as np
import pytest

from loraplex.core.errors import InvalidTensorError, UnsupportedFeatureError
from loraplex.core.support import Support
from loraplex.frontends.kserve.models.inputs import check_requested, read_inputs
from loraplex.frontends.kserve.models.kinds import ENSEMBLE, TENSORRT_LLM
from loraplex.frontends.kserve.tensors import DATATYPES, Tensor, from_values
from support.naming import naming, refused

KINDS = pytest.mark.parametrize("kind", [ENSEMBLE, TENSORRT_LLM], ids=lambda kind: kind.name)


def tensor(name, datatype, shape, *values):
    return from_values(name, datatype, shape, values)


TEXT = tensor("text_input", "BYTES", [1, 1], "hi")
LIMIT = tensor("max_tokens", "INT32", [1, 1], 5)


def read(*tensors, kind=ENSEMBLE, max_batch_size=8):
    return read_inputs(kind, kind.name, tensors, max_batch_size=max_batch_size)


def ones(row) -> Tensor:
    """Return a one-row tensor whose elements are 1 (or true, or "1"): a value with an effect."""
    dtype = DATATYPES[row.datatype].wire_dtype
    shape = [1, *(1 if dim == -1 else dim for dim in row.dims)]
    array = np.full(shape, b"1", dtype=object) if dtype is None else np.ones(shape, dtype=dtype)
    return Tensor.of(row.name, row.datatype, array + array if dtype is not None else array)


@KINDS
def test_the_table_is_sound(kind):
    names = [row.name for row in kind.inputs]
    assert len(set(names)) == len(names)
    assert len({row.name for row in kind.outputs}) == len(kind.outputs)
    for row in kind.inputs:
        assert row.datatype in DATATYPES
        assert bool(row.field) == (row.support is Support.WORKS)
        assert bool(row.reason) == (row.support is not Support.WORKS)
    fields = [row.field for row in kind.declared_inputs if row.field]
    assert len(set(fields)) == len(fields)


def test_tables_are_complete():
    assert len(ENSEMBLE.declared_inputs) == 34
    assert [row.name for row in ENSEMBLE.inputs if row.required] == ["text_input", "max_tokens"]
    assert TENSORRT_LLM.outputs[0].name == "output_ids"
    assert TENSORRT_LLM.inputs[0].name == "input_ids"
    ragged = {row.name for row in TENSORRT_LLM.inputs if row.is_ragged}
    assert {"input_ids", "lora_weights", "lora_config", "stop_words_list"} <= ragged
    assert not any(row.is_ragged and row.has_scalar_reshape for row in TENSORRT_LLM.inputs)


@KINDS
def test_every_input_has_an_effect_or_is_refused_by_name(kind):
    """No input is ignored silently: an unused tensor must be declared as without effect."""
    core = [ones(row) for row in kind.inputs if row.required or row.name == "input_ids"]
    for row in kind.inputs:
        tensors = [t for t in core if t.name != row.name] + [ones(row)]
        if row.support is Support.REFUSED:
            with refused(UnsupportedFeatureError, repr(row.name), param=row.name):
                read(*tensors, kind=kind)
        elif row.support is Support.WORKS:
            assert row.field in read(*tensors, kind=kind)[0].tensors


def test_what_may_be_ignored_is_a_short_list():
    ignored = {row.name for row in ENSEMBLE.inputs if row.support is Support.NO_EFFECT}
    assert ignored == {"pad_id", "prompt_vocab_size"}
    ignored = {row.name for row in TENSORRT_LLM.inputs if row.support is Support.NO_EFFECT}
    assert ignored == {
        "pad_id",
        "prompt_vocab_size",
        "draft_input_ids",
        "draft_logits",
        "draft_acceptance_threshold",
        "return_kv_cache_reuse_stats",
    }


@KINDS
def test_neutral_values_of_refused_inputs_are_accepted(kind):
    core = [ones(row) for row in kind.inputs if row.required or row.name == "input_ids"]
    for row in kind.inputs:
        for value in row.neutral:
            shape = [1, *(1 if dim == -1 else dim for dim in row.dims)]
            count = int(np.prod(shape))
            read(*core, tensor(row.name, row.datatype, shape, *[value] * count), kind=kind)
        if row.support is Support.REFUSED and -1 in row.dims:
            shape = [1, *(0 if dim == -1 else dim for dim in row.dims)]
            read(*core, tensor(row.name, row.datatype, shape), kind=kind)


def test_controls_of_old_clients_are_ignored():
    for name in ("START", "END", "CORRID"):
        assert len(read(TEXT, LIMIT, tensor(name, "INT64", [3], 1, 2, 3))) == 1


def test_a_batch_is_split():
    texts = tensor("text_input", "BYTES", [2, 1], "a", "b")
    words = tensor("stop_words", "BYTES", [2, 2], "1", "2", "3", "4")
    first, second = read(texts, tensor("max_tokens", "INT32", [2, 1], 5, 6), words)
    assert (first.texts("text_input"), first.first("max_tokens", 0)) == (("a",), 5)
    assert (second.texts("stop_words"), second.first("max_tokens", 0)) == (("3", "4"), 6)


def test_an_empty_tensor_is_as_none():
    inputs = read(TEXT, LIMIT, tensor("stop_words", "BYTES", [1, 0]))[0]
    assert inputs.texts("stop_words") == ()
    assert inputs.array("stop_words") is None
    assert inputs.first("temperature", 0.5) == 0.5


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ([TEXT], ("missing required input(s) ['max_tokens']",)),  # Triton's text.
        ([], ("missing required input(s) ['text_input','max_tokens']",)),  # Triton's text.
        ([TEXT, LIMIT, LIMIT], ("input 'max_tokens' already exists in request",)),  # Triton's text.
        ([TEXT, LIMIT, tensor("max_token", "INT32", [1, 1], 1)], ("max_tokens",)),
        ([TEXT, LIMIT, tensor("zzz", "INT32", [1, 1], 1)], ("text_input", "zzz")),
        ([TEXT, LIMIT, tensor("top_k", "INT64", [1, 1], 1)], ("INT32", "top_k", "INT64")),
        (
            [TEXT, LIMIT, tensor("top_k", "INT32", [], 1)],
            ("Expected [-1,1], got []",),
        ),  # Triton's text.
        (
            [TEXT, LIMIT, tensor("top_k", "INT32", [1], 1)],
            ("Expected [-1,1], got [1]",),
        ),  # Triton's text.
        (
            [TEXT, LIMIT, tensor("top_k", "INT32", [2, 1], 1, 1)],
            ("batch size does not match",),
        ),  # Triton's text.
        ([tensor("text_input", "BYTES", [0, 1])], (8, "ensemble", 1, 0)),
    ],
)
def test_what_is_wrong_is_named(tensors, named):
    with pytest.raises(InvalidTensorError) as raised:
        read(*tensors)
    assert re.search(naming(*named), raised.value.message)


def test_a_stop_request_needs_nothing_else():
    stop = tensor("stop", "BOOL", [1, 1], True)
    assert read(stop, kind=TENSORRT_LLM)[0].first("stop")
    # Triton's text.
    with pytest.raises(InvalidTensorError, match="missing required"):
        read(tensor("stop", "BOOL", [1, 1], False), kind=TENSORRT_LLM)


@KINDS
def test_both_models_take_an_adapter_alike(kind):
    weights, config = kind.inputs_by_name["lora_weights"], kind.inputs_by_name["lora_config"]
    assert (weights.datatype, weights.dims) == ("FP16", (-1, -1)), "as old templates declare it"
    assert (config.datatype, config.dims) == ("INT32", (-1, 3))
    assert weights.is_ragged
    assert config.is_ragged


@pytest.mark.parametrize("datatype", ["FP16", "FP32", "BF16"])
@pytest.mark.parametrize("columns", [3, 4, 5])
def test_an_adapter_with_and_without_its_batch_dimension(datatype, columns):
    """Staging reports what is wrong with the rows and columns."""
    weights = np.arange(6, dtype=DATATYPES[datatype].wire_dtype).reshape(1, 2, 3)
    config = np.ones((1, 2, columns), dtype=np.int32)
    for both in ((weights, config), (weights[0], config), (weights, config[0])):
        given = (
            Tensor.of("lora_weights", datatype, both[0]),
            Tensor.of("lora_config", "INT32", both[1]),
        )
        inputs = read(TEXT, LIMIT, *given)[0]
        assert inputs.tensor("lora_weights").datatype == datatype
        assert inputs.array("lora_weights").tolist() == weights[0].tolist()
        assert inputs.array("lora_config").shape == (2, columns)


def test_each_element_of_a_batch_has_its_own_adapter():
    texts = tensor("text_input", "BYTES", [2, 1], "a", "b")
    limits = tensor("max_tokens", "INT32", [2, 1], 5, 5)
    weights = tensor("lora_weights", "FP32", [2, 1, 2], 1.0, 2.0, 3.0, 4.0)
    first, second = read(texts, limits, weights)
    assert first.array("lora_weights").tolist() == [[1.0, 2.0]]
    assert second.array("lora_weights").tolist() == [[3.0, 4.0]]
    for shape in ([2, 2], [1, 2, 2]):
        one = tensor("lora_weights", "FP32", shape, 1.0, 2.0, 3.0, 4.0)
        # Triton's text.
        with pytest.raises(InvalidTensorError, match="'lora_weights' batch size does not match"):
            read(texts, limits, one)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        (
            tensor("lora_weights", "FP64", [1, 1, 1], 1.0),
            ("FP16", "FP32", "BF16", "lora_weights", "FP64"),
        ),
        (
            tensor("lora_config", "INT64", [1, 1, 3], 0, 0, 8),
            ("ensemble", "INT32", "lora_config", "INT64"),
        ),
        (tensor("lora_weights", "FP32", [1], 1.0), ("[-1,-1,-1]", "[1]", "lora_weights")),
        (tensor("lora_weights", "FP32", [1, 1, 1, 1], 1.0), ("[1,1,1,1]", "lora_weights")),
    ],
)
def test_what_cannot_be_an_adapter(tensors, named):
    with pytest.raises(InvalidTensorError) as raised:
        read(TEXT, LIMIT, tensors)
    assert re.search(naming(*named), raised.value.message)
    assert raised.value.param == tensors.name


def test_requested_outputs():
    check_requested(TENSORRT_LLM, "m", ["sequence_length", "context_logits"])
    # Triton's text.
    with pytest.raises(InvalidTensorError, match="unexpected inference output 'x' for model 'm'"):
        check_requested(TENSORRT_LLM, "m", ["x"])
