"""loraplex as a library, with the shipped model: one LLM for most of the tests."""

import gc
import threading
import warnings

import numpy as np
import pytest
from tqdm import tqdm

from loraplex import LLM, SamplingParams
from loraplex.app.llm import Generated
from loraplex.core.beam_search import BeamSearch
from loraplex.core.errors import (
    AdapterExistsError,
    AdapterNotFoundError,
    ConfigError,
    DeadlineExceededError,
    InvalidAdapterError,
    InvalidParameterError,
    InvalidRequestError,
    NotReadyError,
    PromptTooLongError,
    UnsupportedModelError,
)
from loraplex.core.output import FinishReason
from loraplex.core.retention import KVRetention
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from support.naming import naming, refused

PROMPT = "What is the capital of France?"
GREEDY = SamplingParams(max_tokens=24, temperature=0)
SMALL = {"kv_cache_bytes": "8MiB", "num_threads": 1}


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def llm(state_dir):
    with LLM(BASE_PATH, ADAPTER_PATHS, state_dir=state_dir, **SMALL) as llm:
        yield llm


def texts(outputs: list[Generated]) -> list[str]:
    return [output.text.strip() for output in outputs]


def test_one_text(llm):
    (output,) = llm.generate(PROMPT, GREEDY)
    assert output.text.strip() == "Paris"
    assert output.prompt == PROMPT
    assert output.finish_reason is FinishReason.STOP
    assert output.completions[0].stop_reason is None
    assert output.adapter is None
    assert output.logprobs == ()
    assert output.timing.last_token_ns >= output.timing.first_token_ns > 0


def test_a_chat_and_several(llm):
    chat = [{"role": "user", "content": PROMPT}]
    (output,) = llm.chat(chat, GREEDY)
    assert output.text.strip() == "Paris"
    both = llm.chat([chat, chat], GREEDY, adapter=[None, "chinese"])
    assert texts(both) == ["Paris", "巴黎"]
    model = llm._model.service.model(llm._model.name)
    prompt = model.detokenize(output.prompt, skip_special_tokens=False)
    assert PROMPT in prompt


@pytest.mark.parametrize("messages", [[], [[]], [[], [{"role": "user", "content": "x"}]]])
def test_what_is_no_chat(llm, messages):
    with refused(InvalidRequestError, "role", "content", param="messages"):
        llm.chat(messages)


def test_ids_are_a_prompt_and_several_are_several(llm):
    ids = llm.generate(PROMPT, GREEDY)[0].prompt_token_ids
    for prompts in (list(ids), tuple(ids), np.array(ids), [list(ids)], [PROMPT]):
        (output,) = llm.generate(prompts, GREEDY)
        assert output.prompt_token_ids == ids
        assert output.text.strip() == "Paris"
    assert texts(llm.generate([list(ids), PROMPT, np.array(ids)], GREEDY)) == ["Paris"] * 3
    assert llm.generate([]) == []


def test_an_adapter_for_all_or_one_for_each(llm):
    assert texts(llm.generate([PROMPT] * 2, GREEDY, adapter="chinese")) == ["巴黎", "巴黎"]
    outputs = llm.generate([PROMPT] * 3, GREEDY, adapter=["japanese", None, "chinese"])
    assert texts(outputs) == ["パリ", "Paris", "巴黎"]
    digests = {card.name: card.digest for card in llm.adapters()}
    assert [a.adapter and a.adapter.digest for a in outputs] == [
        digests["japanese"],
        None,
        digests["chinese"],
    ]


def test_params_for_each(llm):
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (1, 3)]
    assert [len(a.token_ids) for a in llm.generate([PROMPT] * 2, params)] == [1, 3]


def test_the_default_params_are_openais(llm):
    (output,) = llm.generate(PROMPT)
    assert len(output.token_ids) <= 16


@pytest.mark.parametrize(
    "arguments",
    [
        {"sampling_params": [GREEDY]},
        {"sampling_params": []},
        {"adapter": ["chinese"]},
        {"adapter": []},
    ],
    ids=str,
)
def test_as_many_entries_as_prompts(llm, arguments):
    with pytest.raises(InvalidRequestError, match=r"has (1 entry|\d entries) for 2 prompts"):
        llm.generate([PROMPT] * 2, **arguments)


@pytest.mark.parametrize("params", [{"n": 2}, [None], [5]])
def test_what_is_no_sampling(llm, params):
    with refused(InvalidRequestError, "SamplingParams", "sampling_params", param="sampling_params"):
        llm.generate([PROMPT], params)


@pytest.mark.parametrize("prompts", [[3.5], [PROMPT, None], [[1, "x"]], [[1.0]]])
def test_what_is_no_prompt(llm, prompts):
    with refused(InvalidRequestError, "prompt", param="prompts"):
        llm.generate(prompts)


def test_several_completions(llm):
    params = SamplingParams(max_tokens=8, temperature=1.5, n=3, seed=7, ignore_eos=True)
    (output,) = llm.generate(PROMPT, params)
    assert len(output.completions) == 3
    assert len({completion.token_ids for completion in output.completions}) == 3
    assert output.text == output.completions[0].text
    assert llm.generate(PROMPT, params)[0].completions == output.completions


def test_logprobs(llm):
    params = SamplingParams(
        max_tokens=4, temperature=0, logprobs=2, prompt_logprobs=1, ignore_eos=True
    )
    (output,) = llm.generate(PROMPT, params)
    assert [logprob.token_id for logprob in output.logprobs] == list(output.token_ids)
    assert all(logprob.rank == 1 and len(logprob.top) == 2 for logprob in output.logprobs)
    assert output.prompt_logprobs[0] is None
    reported = [logprob.token_id for logprob in output.prompt_logprobs[1:]]
    assert reported == list(output.prompt_token_ids[1:])


def test_stop_strings(llm):
    params = SamplingParams(max_tokens=24, temperature=0, stop=["ari"])
    (output,) = llm.generate(PROMPT, params)
    assert output.text.strip() == "P"
    assert output.finish_reason is FinishReason.STOP
    assert output.completions[0].stop_reason == "ari"


def test_an_unknown_adapter(llm):
    with pytest.raises(AdapterNotFoundError, match=r"'french'.*'chinese'"):
        llm.generate(PROMPT, GREEDY, adapter="french")


def test_the_first_error_is_raised_and_the_others_were_completed(llm):
    before = llm.stats().generation_tokens
    prompts = [PROMPT, "", [5] * 99999, PROMPT]
    with refused(InvalidRequestError, "empty", param="prompt"):
        llm.generate(prompts, SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    assert llm.stats().generation_tokens == before + 10
    with pytest.raises(PromptTooLongError, match="99999 tokens"):
        llm.generate(prompts[2:], GREEDY)


@pytest.mark.parametrize("field", [{"top_p": 5}, {"stop": "END"}, {"max_tokens": "16"}])
def test_bad_params(llm, field):
    with pytest.raises(InvalidParameterError, match=next(iter(field))):
        llm.generate(PROMPT, SamplingParams(**field))


def test_adapters_come_change_and_go(llm):
    zh, ja = ADAPTER_PATHS["chinese"], ADAPTER_PATHS["japanese"]
    card = llm.add_adapter("mine", zh, task_id=4)
    assert (card.name, card.task_id, card.source) == ("mine", 4, str(zh))
    assert "mine" in {card.name for card in llm.adapters()}
    assert texts(llm.generate(PROMPT, GREEDY, adapter="mine")) == ["巴黎"]
    with pytest.raises(AdapterExistsError):
        llm.add_adapter("mine", str(ja))
    llm.add_adapter("mine", str(ja), replace=True)
    assert texts(llm.generate(PROMPT, GREEDY, adapter="mine")) == ["パリ"]
    llm.remove_adapter("mine")
    with pytest.raises(AdapterNotFoundError):
        llm.generate(PROMPT, adapter="mine")
    with pytest.raises(AdapterNotFoundError):
        llm.remove_adapter("mine")


def test_a_folder_that_is_no_adapter(llm, tmp_path):
    with pytest.raises(InvalidAdapterError):
        llm.add_adapter("mine", tmp_path)
    assert "mine" not in {card.name for card in llm.adapters()}


def test_stats(llm):
    before = llm.stats()
    llm.generate(PROMPT, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    after = llm.stats()
    assert after.generation_tokens == before.generation_tokens + 3
    assert after.prompt_tokens > before.prompt_tokens
    assert (after.num_running, after.num_waiting, after.blocks_held) == (0, 0, 0)


def test_prompts_of_one_call_are_admitted_in_one_plan(llm):
    """Long prompts are tokenized in threads: one by one they would be admitted in several plans."""
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    prompts = [f"{number} " * 5 * number for number in range(1, 8)]
    llm.generate(prompts, params)
    steps = llm._model.service.model(llm._model.name).steps(4)
    assert [len(step.request_ids) for step in steps] == [7] * 4


def test_several_threads_may_generate(llm):
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.extend(texts(llm.generate(PROMPT, GREEDY))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == ["Paris"] * 4


def test_an_interrupt_ends_the_prompts(llm, monkeypatch):
    """What waits in another thread's loop must not go on unseen."""
    wait = llm._wait

    def interrupted(work):
        monkeypatch.setattr("concurrent.futures.Future.result", ctrl_c)
        try:
            return wait(work)
        finally:
            monkeypatch.undo()

    def ctrl_c(future, timeout=None):
        raise KeyboardInterrupt

    before = llm.stats().generation_tokens
    monkeypatch.setattr(llm, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPT, SamplingParams(max_tokens=2000, ignore_eos=True))
    llm.generate(PROMPT, GREEDY)
    assert llm.stats().num_running == 0
    assert llm.stats().generation_tokens < before + 2000


class TestLife:
    def test_close_twice_and_what_comes_after(self, state_dir):
        llm = LLM(str(BASE_PATH), state_dir=str(state_dir), **SMALL)
        threads = threading.active_count()
        llm.close()
        llm.close()
        assert threading.active_count() < threads
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for work in (
                lambda: llm.generate(PROMPT),
                lambda: llm.add_adapter("x", BASE_PATH),
            ):
                with pytest.raises(NotReadyError, match=naming("LLM", "closed")):
                    work()
            gc.collect()

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ({"dtyp": "float32"}, ("LLM", "base.dtyp", "dtype", "max_num_seqs")),
            ({"dtype": "float8"}, ("LLM", "auto", "float8")),
            ({"kv_cache_bytes": "many"}, ("512MiB", "LLM", "many")),
            ({"path": "x"}, ("path", "LLM", "model")),
            ({"engine": "cloud"}, ("engine", "thread", "process", "cloud")),
            ({"adapters": {"zh": "/nowhere"}}, ("zh", "/nowhere")),
            ({"max_model_len": 10**6}, ("max_model_len", 1000000, 2048)),
            (
                {"max_num_seqs": 600, "max_num_batched_tokens": 512},
                ("max_num_batched_tokens", 512, "max_num_seqs", 600),
            ),
            ({"kv_cache_bytes": 1}, ("KV", 0, "kv_cache_bytes")),
            ({"chat_template": "/nowhere"}, ("chat_template", "/nowhere")),
        ],
        ids=str,
    )
    def test_a_wrong_setting_leaves_nothing_behind(self, state_dir, arguments, named):
        threads = set(threading.enumerate())
        with pytest.raises(ConfigError, match=naming(*named)):
            LLM(BASE_PATH, state_dir=state_dir, **(SMALL | arguments))
        # The monitor of progress bars belongs to the process, whichever test draws the first bar.
        threads.add(tqdm.monitor)
        for thread in set(threading.enumerate()) - threads:
            thread.join(60)  # one that saw a process end may itself be ending
        assert set(threading.enumerate()) <= threads

    def test_models_that_are_none(self, tmp_path):
        with pytest.raises(ConfigError, match=naming(tmp_path)):
            LLM(tmp_path / "nowhere" / "at" / "all")
        with pytest.raises(ConfigError, match=naming(tmp_path, "config.json")):
            LLM(tmp_path)
        (tmp_path / "config.json").write_text('{"architectures": ["T5Model"]}')
        with pytest.raises(UnsupportedModelError, match=r"T5Model.*LlamaForCausalLM"):
            LLM(tmp_path)

    def test_a_prompt_in_work_is_reported_of_the_close(self, state_dir):
        llm = LLM(BASE_PATH, state_dir=state_dir, **SMALL)
        errors: list[BaseException] = []

        def send() -> None:
            try:
                llm.generate(PROMPT, SamplingParams(max_tokens=2000, ignore_eos=True))
            except NotReadyError as error:
                errors.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        while not llm.stats().num_running:
            pass
        llm.close()
        thread.join(60)
        assert [str(error) for error in errors] == ["the server is stopping"]

    def test_an_engine_in_its_own_process(self, state_dir):
        with LLM(BASE_PATH, ADAPTER_PATHS, engine="process", state_dir=state_dir, **SMALL) as llm:
            outputs = llm.generate([PROMPT] * 2, GREEDY, adapter=[None, "chinese"])
        assert texts(outputs) == ["Paris", "巴黎"]


def test_beams(llm):
    sampling = SamplingParams(max_tokens=24, n=2, beam=BeamSearch(width=3))
    [output] = llm.generate(PROMPT, sampling)
    first, second = output.completions
    assert output.text.strip() == first.text.strip() == "Paris"
    assert first.cumulative_logprob > second.cumulative_logprob
    assert first.text != second.text


def test_the_best_of_several(llm):
    fields = {"max_tokens": 24, "temperature": 1.5, "seed": 3}
    [every] = llm.generate(PROMPT, SamplingParams(n=5, logprobs=0, **fields))
    [best] = llm.generate(PROMPT, SamplingParams(n=2, best_of=5, **fields))
    means = [(mean_logprob(output), output.text) for output in every.completions]
    expected = [text for _, text in sorted(means, key=lambda pair: -pair[0])[:2]]
    assert [output.text for output in best.completions] == expected
    assert best.completions[0].logprobs == ()


def mean_logprob(output) -> float:
    return sum(entry.logprob for entry in output.logprobs) / len(output.logprobs)


def test_logits_are_arrays_that_chose_the_tokens(llm):
    sampling = SamplingParams(
        max_tokens=24, temperature=0, return_logits=True, return_prompt_logits=True, logprobs=0
    )
    [output] = llm.generate(PROMPT, sampling)
    [completion] = output.completions
    vocabulary = completion.logits.shape[1]
    assert completion.logits.argmax(axis=1).tolist() == list(completion.token_ids)
    assert output.prompt_logits.shape == (len(output.prompt_token_ids), vocabulary)
    assert output.prompt_logits[-1].argmax() == completion.token_ids[0]
    scores = completion.logits - np.log(np.exp(completion.logits).sum(axis=1, keepdims=True))
    reported = [entry.logprob for entry in completion.logprobs]
    assert scores.max(axis=1) == pytest.approx(reported, abs=1e-4)
    assert llm.generate(PROMPT, GREEDY)[0].completions[0].logits is None


def test_logits_of_several_chunks(state_dir):
    small = {"max_num_batched_tokens": 4, "max_num_seqs": 4, "enable_prefix_cache": False}
    with LLM(BASE_PATH, state_dir=state_dir / "chunks", **SMALL, **small) as llm:
        sampling = SamplingParams(max_tokens=1, temperature=0, return_prompt_logits=True)
        [chunked] = llm.generate(PROMPT, sampling)
    assert len(chunked.prompt_token_ids) > 4
    assert chunked.prompt_logits.shape[0] == len(chunked.prompt_token_ids)
    assert chunked.prompt_logits[-1].argmax() == chunked.token_ids[0]


def test_what_may_be_said_beside_the_sampling(llm):
    [output] = llm.generate(PROMPT, GREEDY)
    [goes_on] = llm.generate(PROMPT, GREEDY, end_id=-1)
    assert len(goes_on.token_ids) == 24
    first = output.token_ids[0]
    [ended] = llm.generate(PROMPT, GREEDY, end_id=first, priority=-1)
    assert ended.token_ids == (first,)
    assert ended.finish_reason is FinishReason.STOP
    with pytest.raises(DeadlineExceededError):
        llm.generate(
            [PROMPT] * 8,
            SamplingParams(max_tokens=200, ignore_eos=True),
            timeout_seconds=1e-6,
        )
    with pytest.raises(InvalidParameterError, match="retention"):
        llm.generate(PROMPT, GREEDY, retention=KVRetention(decode_priority=101))
