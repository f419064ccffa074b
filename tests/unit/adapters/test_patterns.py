import gc
import os
import re
import signal
import time

import msgspec
import pytest

from loraplex.adapters.formats import patterns
from loraplex.adapters.formats.patterns import Matcher
from loraplex.adapters.formats.peft_config import PeftConfig, parse_config
from loraplex.core.errors import InvalidAdapterError
from support.naming import naming

PATH = "model.layers.0.self_attn.q_proj"
HOSTILE = r"(\w+\.?)+!"
"""Backtracks through every division of a path into words: 2^26 of them."""


@pytest.fixture
def without_collector():
    """Hypothesis has a callback of the collector, where an error of a signal handler is lost."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "pattern",
    [
        HOSTILE,
        r"((a|[a-z._0-9])*)*!",
        r"(?=(\w+\.?)+!).*",  # a lookahead, which RE2 would not match at all
    ],
)
def test_a_pattern_that_backtracks_for_ever_is_refused(pattern):
    matcher = Matcher(seconds=0.05)
    with pytest.raises(InvalidAdapterError, match=naming(0.05, "CPU")):
        matcher.fullmatch(pattern, PATH * 3)


@pytest.mark.usefixtures("without_collector")
def test_others_go_first_while_a_pattern_takes_long(monkeypatch):
    polite = []
    monkeypatch.setattr(patterns, "_when_slow", [])
    patterns.call_when_slow(lambda: polite.append(True))
    matcher = Matcher(seconds=0.5)
    assert matcher.match("model", PATH)
    assert not polite
    with pytest.raises(InvalidAdapterError, match="CPU time"):
        matcher.fullmatch(HOSTILE, PATH * 3)
    assert polite == [True]


@pytest.mark.usefixtures("without_collector")
def test_a_users_process_keeps_its_priority():
    niceness = os.nice(0)
    with pytest.raises(InvalidAdapterError, match="CPU time"):
        Matcher(seconds=0.5).fullmatch(HOSTILE, PATH * 3)
    assert os.nice(0) == niceness


def test_the_time_is_that_of_all_patterns_together():
    matcher = Matcher(seconds=0.05)
    with pytest.raises(InvalidAdapterError):
        matcher.match(HOSTILE, PATH)
    with pytest.raises(InvalidAdapterError, match=naming("CPU", 0.05, "(\\\\w+\\\\.?)+!")):
        matcher.match("model", PATH)


def test_one_timer_is_for_all_patterns_of_a_module(monkeypatch):
    """An adapter of 18432 experts' projections would spend its time on timers."""
    started = []
    set_timer = signal.setitimer

    def count(which, seconds, interval=0.0):
        started.extend([seconds] if seconds else [])
        return set_timer(which, seconds, interval)

    config = PeftConfig(rank_pattern={f"x{index}": 2 for index in range(20)}, target_modules="m.*")
    config.check_patterns()
    monkeypatch.setattr(signal, "setitimer", count)
    assert config.settings_of(PATH) == (True, 8, 1.0)
    assert len(started) == 1


def test_a_block_of_matches_is_limited_as_a_whole():
    matcher = Matcher(seconds=0.05)

    def match_both():
        with matcher.limited():
            matcher.match("model", PATH)
            matcher.fullmatch(HOSTILE, PATH * 3)

    with pytest.raises(InvalidAdapterError, match=re.escape(repr(HOSTILE))):
        match_both()


def test_a_pattern_that_takes_long_to_compile_is_refused(without_collector):
    with pytest.raises(InvalidAdapterError, match=naming("CPU", 0.05, "c...a")):
        Matcher(seconds=0.05).compile("(a|b?c)" * 100_000)


def test_waiting_does_not_count(monkeypatch):
    matcher = Matcher(seconds=0.05)
    assert matcher.match("model", PATH)
    time.sleep(0.06)
    assert matcher.match("model", PATH)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|v_proj)).*?",
        r"(?!.*k_proj).*_proj",
        r".*(?<=self_attn\.)q_proj",
        r"(?i)MODEL\..*q_proj",
        r"model\.layers\.\d",
    ],
)
def test_the_semantics_are_those_of_re(pattern):
    for path in (PATH, f"language_{PATH}", "lm_head", "model.layers.0.self_attn.k_proj"):
        assert bool(Matcher().fullmatch(pattern, path)) == bool(re.fullmatch(pattern, path))


@pytest.mark.parametrize(
    "values",
    [
        {"target_modules": HOSTILE},
        {"exclude_modules": HOSTILE},
        {"target_modules": ["q_proj"], "rank_pattern": {HOSTILE: 4}},
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": [HOSTILE]},
        {"modules_to_save": [HOSTILE]},
    ],
)
def test_every_pattern_of_a_config_is_limited(values, monkeypatch):
    monkeypatch.setattr("loraplex.adapters.formats.patterns.MATCHING_SECONDS", 0.05)
    config = parse_config(msgspec.json.encode({"peft_type": "LORA"} | values))
    path = f"{PATH}.{PATH}.{PATH}"
    with pytest.raises(InvalidAdapterError, match=naming("CPU", 0.05)):
        config.settings_of(path)
