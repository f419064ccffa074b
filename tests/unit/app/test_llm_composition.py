"""Several adapters and comparisons through the library; tests/golden has what they must output."""

import re

import numpy as np
import pytest

from loraplex import LLM, SamplingParams
from loraplex.core.errors import AdapterNotFoundError, InvalidParameterError, InvalidRequestError
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from support.naming import naming

PROMPT = "What is the capital of France?"
GREEDY = SamplingParams(max_tokens=24, temperature=0)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    state_dir = tmp_path_factory.mktemp("state")
    settings = {"kv_cache_bytes": "8MiB", "num_threads": 1}
    with LLM(BASE_PATH, ADAPTER_PATHS, state_dir=state_dir, **settings) as llm:
        yield llm


def test_one_for_all_or_one_for_each(llm):
    weak = {"chinese": 0.0}
    names = [weak, {"chinese": np.float32(1.0)}, "japanese", None, {}]
    outputs = llm.generate([PROMPT] * 5, GREEDY, adapter=names)
    assert [output.text for output in outputs] == ["Paris", "巴黎", "パリ", "Paris", "Paris"]
    assert [len(output.adapters) for output in outputs] == [1, 1, 1, 0, 0]
    assert (outputs[0].adapter.name, outputs[0].adapter.scale) == ("chinese", 0.0)
    assert outputs[3].adapter is None
    both = {"chinese": 1.0, "japanese": 0.0}
    assert [a.text for a in llm.generate([PROMPT] * 2, GREEDY, adapter=both)] == ["巴黎"] * 2


@pytest.mark.parametrize(
    ("adapter", "named"),
    [
        ({"chinese": "1"}, ("{'chinese': '1'}", "{'fr': 0.7, 'legal': 0.3}")),
        ({"chinese": True}, ("chinese", "{'fr': 0.7, 'legal': 0.3}")),
        ({5: 0.5}, ("{5: 0.5}", "{'fr': 0.7, 'legal': 0.3}")),
        ([("chinese", 0.5)], ("chinese", 0.5, "{'fr': 0.7, 'legal': 0.3}")),
        ({"chinese": 200}, ("[-100, 100]", 200)),
        ({"chinese": float("nan")}, ("nan", "[-100, 100]")),
        ({str(i): 1 for i in range(17)}, (17, 16)),
    ],
)
def test_what_is_wrong_is_reported(llm, adapter, named):
    with pytest.raises((InvalidRequestError, InvalidParameterError)) as caught:
        llm.generate(PROMPT, GREEDY, adapter=adapter)
    assert re.search(naming(*named), caught.value.message)


def test_an_unknown_one_is_named(llm):
    with pytest.raises(AdapterNotFoundError, match="'no'"):
        llm.generate(PROMPT, GREEDY, adapter={"chinese": 1.0, "no": 1.0})


def test_a_comparison(llm):
    base, chinese, no = llm.compare(PROMPT, [None, "chinese", {"no": 1.0}])
    assert (base.text, chinese.text) == ("Paris", "巴黎")
    assert isinstance(no, AdapterNotFoundError)
    assert chinese.versus_base.num_same_tokens == 0
    assert chinese.versus_base.first.token_id == chinese.token_ids[0]
    assert llm.compare(PROMPT, []) == []


def test_outputs_that_are_compared_begin_in_one_step(llm):
    choices = [None, "chinese", "japanese"]
    llm.compare(PROMPT, choices)  # from here on the adapters are on the device
    timings = [output.timing for output in llm.compare(PROMPT, choices)]
    assert len({timing.first_step for timing in timings}) == 1
    assert all(timing.last_step > timing.first_step > 0 for timing in timings)


def test_sampled_outputs_differ_by_their_adapters_only(llm):
    sampling = SamplingParams(max_tokens=12, temperature=2.0, ignore_eos=True)
    one, other = llm.compare(PROMPT, ["chinese", {"chinese": 1.0}], sampling)
    assert one.token_ids == other.token_ids
    with pytest.raises(InvalidParameterError, match="top_p"):
        llm.compare(PROMPT, [None], SamplingParams(top_p=2))
