"""Tokens of a prompt that a vector leaves out (`include_prompt` false)."""

import msgspec
import pytest

from loraplex.core.request import GenerateRequest, Prefix, PromptTruncation, TruncationSide
from loraplex.core.task import Pool, PoolKind
from loraplex.core.vector_format import TextPrompts, VectorFormat
from loraplex.serving.served_model import ServedModel

BEFORE = "Find this: "


@pytest.fixture
def model(make_model) -> ServedModel:
    model: ServedModel = make_model("a", None)
    prompts = TextPrompts(texts={"query": BEFORE})
    vectors = VectorFormat(prompts=prompts, includes_prompts=False)
    model.card = msgspec.structs.replace(model.card, vectors=vectors)
    return model


async def read(
    model: ServedModel, text: str, kind: PoolKind, truncation: PromptTruncation | None = None
) -> tuple[list[int], int]:
    """Return the tokens of a text with its prompt, and how many of them are left out."""
    sent = GenerateRequest(
        request_id=1,
        model="a",
        prompt=text,
        task=Pool(kind),
        prefix=Prefix("query"),
        truncation=truncation,
    )
    request, token_ids = await model.in_tokens(model.with_prefix(sent, ()))
    assert isinstance(request.task, Pool)
    return list(token_ids), request.task.num_left_out


@pytest.mark.parametrize("kind", [PoolKind.MEAN, PoolKind.WEIGHTED_MEAN, PoolKind.CLS])
async def test_a_mean_leaves_out_the_prompt(model: ServedModel, kind: PoolKind) -> None:
    token_ids, num_left_out = await read(model, "Paris is", kind)
    assert num_left_out == len(model.tokenize(BEFORE))
    assert token_ids == model.tokenize(BEFORE + "Paris is")


async def test_the_last_token_is_there_whatever_the_prompt(model: ServedModel) -> None:
    """A text of one token, of which the prompt's last token becomes a part, is not empty."""
    assert len(model.tokenize(BEFORE + "the")) == len(model.tokenize(BEFORE))
    assert (await read(model, "the", PoolKind.LAST))[1] == 0


@pytest.mark.parametrize("most", [12, 6, 4])
async def test_what_is_cut_off_of_the_prompt_is_not_left_out(model: ServedModel, most: int) -> None:
    """A cut on the left takes the prompt first, and what stays of the text counts."""
    text = "Paris is the capital of France."
    num_first, num_last = model.num_special_tokens
    num_text = len(model.tokenize(BEFORE + text)) - len(model.tokenize(BEFORE))
    cut = PromptTruncation(most, TruncationSide.LEFT)
    token_ids, num_left_out = await read(model, text, PoolKind.MEAN, cut)
    assert (len(token_ids), num_last) == (most, 0)
    assert num_left_out == max(num_first, most - num_text)
    assert token_ids[num_left_out:] == model.tokenize(BEFORE + text)[num_left_out - most :]
    right = msgspec.structs.replace(cut, side=TruncationSide.RIGHT)
    assert (await read(model, text, PoolKind.MEAN, right))[1] == len(model.tokenize(BEFORE))
