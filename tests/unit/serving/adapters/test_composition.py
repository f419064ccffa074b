import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.staged import StagedAdapter
from loraplex.adapters.version import AdapterVersion
from loraplex.core.adapter import OUTSIDE_LAYERS, AdapterSource, LoraTarget, TargetPart
from loraplex.core.errors import UnsupportedFeatureError
from loraplex.serving.admission import compose
from support.naming import naming

UNTIED = BaseShapes(2, {"q_proj": (8, 8)}, vocab_size=50, hidden_size=8)
TIED = BaseShapes(2, {"q_proj": (8, 8)}, vocab_size=50, hidden_size=8, ties_embeddings=True)


def version(digest: str, *parts: tuple[str, TargetPart], name: str = "") -> AdapterVersion:
    targets = tuple(LoraTarget(OUTSIDE_LAYERS, module, 2, 8, 50, part) for module, part in parts)
    source = AdapterSource(digest, "/normal", 100, (LoraTarget(0, "q_proj", 2, 8, 8), *targets))
    staged = StagedAdapter(source=source, dtypes=("F32",), num_tensors=2)
    return AdapterVersion(
        model="base",
        tenant="default",
        name=name or digest,
        task_id=None,
        number=1,
        staged=staged,
        path="/a",
        created=0,
    )


def composed(*chosen, shapes=UNTIED):
    return [(version.digest, scale) for version, scale in compose(list(chosen), shapes)]


def test_one_order_each_content_once_and_nothing_without_effect():
    a, b, zero = version("a"), version("b"), version("zero")
    again = version("a", name="alias")
    assert composed((b, 0.5), (a, 1.0), (zero, 0.0), (again, -0.25)) == [("a", 0.75), ("b", 0.5)]
    assert composed((a, 0.5), (b, 1.0), (again, -0.5)) == [("b", 1.0)]
    assert composed((a, -0.0)) == []
    assert composed() == []


scales = st.floats(-100, 100)


@given(chosen=st.lists(st.tuples(st.sampled_from("abc"), scales), max_size=6), data=st.data())
def test_the_order_says_nothing(chosen, data):
    shuffled = data.draw(st.permutations(chosen))
    one, other = (
        composed(*((version(digest), scale) for digest, scale in order))
        for order in (chosen, shuffled)
    )
    assert one == other


ROWS, TOKENS, LORA = TargetPart.ROWS, TargetPart.TOKENS, TargetPart.LORA
HEAD, EMBEDDING = "lm_head", "embed_tokens"


@pytest.mark.parametrize(
    ("mine", "other", "is_tied"),
    [
        ((HEAD, ROWS), (HEAD, ROWS), False),
        ((HEAD, ROWS), (HEAD, LORA), False),
        ((HEAD, TOKENS), (HEAD, TargetPart.FACTOR), False),
        ((EMBEDDING, TOKENS), (EMBEDDING, TOKENS), False),
        ((EMBEDDING, ROWS), (EMBEDDING, TargetPart.EMBEDDING_A), False),
        ((EMBEDDING, TOKENS), (HEAD, LORA), True),
        ((HEAD, ROWS), (EMBEDDING, TargetPart.EMBEDDING_A), True),
    ],
)
@pytest.mark.parametrize("digests", ["ab", "ba"])
def test_replaced_rows_take_no_other_change(mine, other, is_tied, digests):
    shapes = TIED if is_tied else UNTIED
    one, two = version(digests[0], mine, name="one"), version(digests[1], other, name="two")
    chosen = [(one, 0.5), (two, 0.5)]
    for order in itertools.permutations(chosen):
        with pytest.raises(UnsupportedFeatureError, match=r"'one' and 'two'|'two' and 'one'") as e:
            compose(list(order), shapes)
        assert re.search(naming(other[0], "two", "one"), e.value.message)
    assert composed(chosen[0], (chosen[1][0], 0.0), shapes=shapes) == [(one.digest, 0.5)]


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ((HEAD, ROWS), (EMBEDDING, ROWS)),
        ((HEAD, LORA), (HEAD, LORA)),
        ((HEAD, TargetPart.FACTOR), (HEAD, TargetPart.FACTOR)),
        ((EMBEDDING, TOKENS), (HEAD, LORA)),
    ],
)
def test_what_adds_up_is_let_through(mine, other):
    pair = (version("a", mine), 0.5), (version("b", other), 2.0)
    assert composed(*pair) == [("a", 0.5), ("b", 2.0)]


def test_an_adapter_agrees_with_itself():
    """One adapter under two names counts as one."""
    a = version("a", (HEAD, ROWS))
    assert composed((a, 0.5), (version("a", (HEAD, ROWS), name="alias"), 0.5)) == [("a", 1.0)]
