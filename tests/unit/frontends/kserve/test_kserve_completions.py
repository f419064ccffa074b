import numpy as np
import pytest
from msgspec.structs import replace

from loraplex.core.output import FinishReason, Logits, SequenceOutput, TokenLogprob
from loraplex.core.request import GenerateRequest
from loraplex.frontends.kserve.models.convert import TritonGeneration
from loraplex.frontends.kserve.models.kinds import ENSEMBLE, TENSORRT_LLM
from loraplex.frontends.kserve.models.output_tensors import SequenceSoFar, output_tensors
from loraplex.frontends.kserve.tensors import to_raw

END = 99


def generation(prompt="ab", **options):
    flags = {
        "is_streamed": False,
        "excludes_input": False,
        "returns_log_probs": False,
        "returns_num_input_tokens": False,
        "returns_num_output_tokens": False,
    }
    request = GenerateRequest(request_id=1, model="m", prompt=prompt)
    return TritonGeneration(request=request, end_token_ids=frozenset({END}), **{**flags, **options})


def output(*token_ids, text="", finish=None, stop_reason=None):
    logprobs = tuple(TokenLogprob(token_id, -0.5, 1) for token_id in token_ids)
    return SequenceOutput(0, text, token_ids, logprobs, finish, stop_reason)


def response(*outputs, prompt=(1, 2), index=0, **options):
    made = SequenceSoFar(generation(**options), index)
    made.begin(prompt)
    for piece in outputs:
        made.add(piece)
    return made


def by_name(kind, batch, **options):
    return {t.name: t.array.tolist() for t in output_tensors(kind, batch, **options)}


def test_the_prompt_comes_first_if_neither_excluded_nor_streamed():
    assert response(output(3, text="c")).token_ids == [1, 2, 3]
    assert response(output(3, text="c")).whole_text == "abc"
    for option in ("excludes_input", "is_streamed"):
        made = response(output(3, text="c"), **{option: True})
        assert (made.token_ids, made.whole_text) == ([3], "c")


def test_the_prompt_is_taken_once():
    made = response(output(3))
    made.begin((1, 2))
    assert made.token_ids == [1, 2, 3]
    assert made.num_input_tokens == 2


@pytest.mark.parametrize(
    ("last", "kept"),
    [
        (output(5, END, finish=FinishReason.STOP), [5]),
        (output(5, END, finish=FinishReason.STOP, stop_reason=END), [5]),
        (output(5, END, finish=FinishReason.LENGTH), [5, END]),
        (output(5, END, finish=FinishReason.STOP, stop_reason="x"), [5, END]),
        (output(5, 6, finish=FinishReason.STOP, stop_reason=6), [5, 6]),
        (output(finish=FinishReason.STOP), []),
        (output(5, END), [5, END]),
    ],
)
def test_the_end_token_is_not_shown(last, kept):
    made = response(last, excludes_input=True)
    assert made.token_ids == kept
    assert made.num_output_tokens == len(kept)
    assert len(made.log_probs) == len(kept)


@pytest.mark.parametrize(
    ("leaves_out", "has_end_token", "kept"),
    [(True, True, [5]), (True, False, [5, 7]), (False, True, [5, 7])],
)
def test_every_end_token_of_the_model_is_left_out(leaves_out, has_end_token, kept):
    """Models and adapters may have several, of which the request names the first at most."""
    last = replace(output(5, 7, finish=FinishReason.STOP), has_end_token=has_end_token)
    made = response(last, excludes_input=True, leaves_out_ends=leaves_out)
    assert by_name(TENSORRT_LLM, [[made]]) == {
        "output_ids": [[kept]],
        "sequence_length": [[len(kept)]],
    }
    assert len(made.log_probs) == len(kept)


def test_token_outputs_are_padded_with_minus_one():
    batch = [[response(output(3)), response(output(4, 5, 6), index=1)]]
    assert by_name(TENSORRT_LLM, batch) == {
        "output_ids": [[[1, 2, 3, -1, -1], [1, 2, 4, 5, 6]]],
        "sequence_length": [[3, 5]],
    }


def test_text_outputs_are_flat():
    batch = [[response(output(3, text="c"))], [response(output(3, text="d"))]]
    assert by_name(ENSEMBLE, batch) == {"text_output": [b"abc", b"abd"]}


def test_log_probs():
    options = {"returns_log_probs": True, "excludes_input": True}
    batch = [[response(output(3), **options), response(output(4, 5), index=1, **options)]]
    got = by_name(ENSEMBLE, batch)
    assert got["cum_log_probs"] == [[-0.5, -1.0]]
    assert got["output_log_probs"] == [[[-0.5, -1.0], [-0.5, -0.5]]]


def test_counts_and_indices():
    options = {"returns_num_input_tokens": True, "returns_num_output_tokens": True}
    got = by_name(TENSORRT_LLM, [[response(output(3), **options)]], batch_index=4, sequence_index=2)
    assert (got["batch_index"], got["sequence_index"]) == ([[4]], [[2]])
    assert (got["num_input_tokens"], got["num_output_tokens"]) == ([[2]], [[1]])


def test_pieces_of_a_stream():
    made = response(output(3, text="c"), is_streamed=True, returns_log_probs=True)
    made.drain()
    assert not made.is_sent
    made.add(output(4, text="d", finish=FinishReason.LENGTH))
    got = by_name(ENSEMBLE, [[made]])
    assert got["text_output"] == [b"d"]
    assert got["output_log_probs"] == [[[-0.5]]]
    assert got["cum_log_probs"] == [[-1.0]], "of all tokens so far"
    made.drain()
    assert made.is_sent
    empty = by_name(TENSORRT_LLM, [[made]])
    assert empty["output_ids"] == [[[]]]
    assert empty["sequence_length"] == [[0]]


def test_each_kind_of_logits_has_its_own_type():
    wishes = {"returns_context_logits": True, "returns_generation_logits": True}
    types = {"context_logits_datatype": "FP16", "generation_logits_datatype": "BF16"}
    made = response(**wishes, **types)
    one = Logits(num_rows=1, data=np.ones(2, np.float32).tobytes())
    made.prompt_logits, made.logits = (one,), [one]
    tensors = [t for t in output_tensors(TENSORRT_LLM, [[made]]) if t.name.endswith("_logits")]
    assert [(t.name, t.datatype, t.shape) for t in tensors] == [
        ("context_logits", "FP16", (1, 1, 2)),
        ("generation_logits", "BF16", (1, 1, 1, 2)),
    ]
    assert [to_raw(t) for t in tensors] == [b"\x00\x3c" * 2, b"\x80\x3f" * 2]
