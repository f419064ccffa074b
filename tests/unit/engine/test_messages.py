"""Every message between serving and an engine survives the way there, whatever it holds."""

import math
import typing

import msgspec
import pytest

from loraplex.core.adapter import AdapterSource, AdapterUse, LoraTarget, Residency
from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.errors import ErrorInfo
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.output import (
    EngineOutput,
    FinishReason,
    LogitsFile,
    PromptLogprobs,
    RequestTiming,
    SequenceDelta,
    TokenLogprob,
)
from loraplex.core.plan import (
    AdapterCopy,
    BlockCopy,
    BlockTransfer,
    RowAdded,
    RowResult,
    RowStep,
    StepPlan,
    StepResult,
    StepTiming,
    Wanted,
)
from loraplex.core.request import EngineRequest
from loraplex.core.retention import KVRetention, TokenRangeRetention
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.stats import (
    AdapterActivity,
    AdapterTierStats,
    Durations,
    EngineStats,
    StepRecord,
)
from loraplex.core.task import Generate, Pool
from loraplex.engine.messages import (
    AbortRequest,
    AdapterPinned,
    AdapterRejected,
    AdaptersReport,
    AddRequest,
    AddRequests,
    ConfirmEvents,
    EngineCommand,
    EngineEnded,
    EngineEvent,
    EngineFailed,
    EngineReady,
    PinAdapter,
    PreloadAdapter,
    QueryAdapters,
    RegisterAdapter,
    Shutdown,
    StepDone,
    UnpinAdapter,
    UnregisterAdapter,
    decode_command,
    decode_event,
    encode,
)
from support.fake_runner import FAKE_CAPACITY

UINT64 = 2**64 - 1
SAMPLING = SamplingParams(
    max_tokens=2**31 - 1,
    min_tokens=3,
    n=2,
    best_of=3,
    beam=BeamSearch(
        width=4,
        length_penalty=-0.5,
        diversity_rate=0.25,
        early_stopping=EarlyStopping.NEVER,
    ),
    temperature=0.7,
    top_k=-1,
    top_p=0.9,
    top_p_decay=0.99,
    top_p_min=0.2,
    top_p_reset_id=5,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=-2.0,
    frequency_penalty=2.0,
    no_repeat_ngram_size=3,
    logit_bias=((1, -math.inf), (7, 0.5)),
    allowed_token_ids=(1, 7, 8),
    bad_words=("bäd",),
    bad_token_ids=((4,), (5, 6)),
    grammar=Grammar(GrammarKind.CHOICE, '["a", "b"]'),
    num_draft_tokens=0,
    seed=UINT64,
    stop=("終", "\n\n", "\x00"),
    stop_token_ids=(0, 2**31 - 1),
    stop_token_sequences=((1, 2), (3,)),
    include_stop_in_output=True,
    ignore_eos=True,
    logprobs=0,
    prompt_logprobs=20,
    return_logits=True,
    return_prompt_logits=True,
    skip_special_tokens=False,
)
REQUEST = EngineRequest(
    request_id=UINT64,
    prompt_token_ids=(0, 5, 2**31 - 1),
    task=Generate(SAMPLING),
    eos_token_ids=(2,),
    adapters=(AdapterUse("ab" * 32, -0.5), AdapterUse("cd" * 32)),
    kv_salt=bytes(range(256)),
    tenant="ténant",
    priority=-(2**63),
    arrival_ns=2**62,
    deadline_ns=2**62 + 1,
    requires_resident=True,
    retention=KVRetention((TokenRangeRetention(0, 4, 80, 1500), TokenRangeRetention(4)), 20, 2500),
    outputs=((5, 6), ()),
    ended=(1,),
    prompt_scores_delivered=True,
    num_restarts=3,
)
SOURCE = AdapterSource("ab" * 32, "/state/normal/ab", 2**40, (LoraTarget(0, "q_proj", 8, 64, 32),))
TIERS = AdapterTierStats(host_bytes_used=2**40, read_times=Durations().with_one(3_000_000))
LOGPROB = TokenLogprob(7, -0.25, 1, ((7, -0.25), (8, -math.inf)))
COMMANDS = [
    AddRequest(REQUEST),
    AddRequests((REQUEST, REQUEST)),
    AddRequest(msgspec.structs.replace(REQUEST, task=Pool(dimensions=3, normalize=False))),
    AbortRequest(UINT64),
    AbortRequest(1, 0),
    RegisterAdapter(SOURCE),
    UnregisterAdapter("ab" * 32),
    QueryAdapters(UINT64),
    PreloadAdapter("ab" * 32),
    PinAdapter(UINT64, "ab" * 32),
    UnpinAdapter("ab" * 32),
    Shutdown(),
    ConfirmEvents(),
]
EVENTS = [
    EngineReady(FAKE_CAPACITY),
    EngineEnded(),
    EngineFailed(ErrorInfo("invalid_config", "no weights", "path", 1.0)),
    StepDone((), EngineStats()),
    StepDone(
        (
            EngineOutput(
                UINT64,
                (
                    SequenceDelta(0, (7,), (LOGPROB,), FinishReason.STOP, 7),
                    SequenceDelta(1, (8, 9)),
                    SequenceDelta(2, pooled=bytes(range(8))),
                ),
                prompt_logprobs=PromptLogprobs.of((None, LOGPROB)),
                finished=True,
                error=ErrorInfo("row_failed", "hm"),
                timing=RequestTiming(*range(1, 1 + len(RequestTiming.__struct_fields__))),
            ),
            EngineOutput(0),
        ),
        EngineStats(steps=UINT64, adapters=TIERS),
        StepRecord(*range(15), request_ids=(UINT64, 0)),
    ),
    AdaptersReport(
        UINT64,
        AdapterActivity(
            {"ab" * 32: Residency.DEVICE, "cd" * 32: Residency.LOADING},
            {"ab" * 32: 2},
            {"cd" * 32: 1},
            ("ab" * 32,),
        ),
    ),
    AdapterPinned(UINT64),
    AdapterPinned(1, ErrorInfo("adapter_too_large", "3 of 4 pages")),
    AdapterRejected("ab" * 32, ErrorInfo("adapter_too_large", "17 pages")),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_commands_come_back_equal(command):
    assert decode_command(encode(command)) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_come_back_equal(event):
    back = decode_event(encode(event))
    assert back == event
    assert type(back) is type(event)


def test_no_message_is_forgotten_here():
    assert {type(c) for c in COMMANDS} == set(typing.get_args(EngineCommand))
    assert {type(e) for e in EVENTS} == set(typing.get_args(EngineEvent))


def test_sampling_params_here_differ_from_every_default():
    defaults = SamplingParams()
    same = [
        name
        for name in SamplingParams.__struct_fields__
        if getattr(SAMPLING, name) == getattr(defaults, name)
    ]
    assert same == []


def test_commands_and_events_are_not_taken_for_each_other():
    with pytest.raises(msgspec.ValidationError):
        decode_event(encode(Shutdown()))
    with pytest.raises(msgspec.ValidationError):
        decode_command(encode(EngineReady(FAKE_CAPACITY)))
    with pytest.raises(msgspec.DecodeError):
        decode_command(b"\xc1")


def test_plans_and_results_can_be_logged():
    plan = StepPlan(
        step_id=9,
        removed=(1,),
        added=(
            RowAdded(
                0,
                5,
                Generate(SAMPLING, seed=UINT64, suppressed_token_ids=(2,), end_token_ids=(6,)),
                1,
                (1, 2),
                2,
                adapters=((3, 0.5),),
            ),
        ),
        rows=(
            RowStep(0, 0, 2, (1, 2), (), ((4, 5),), Wanted.ALL, 3, 4),
            RowStep(2, 7, 1),
        ),
        block_offloads=(BlockTransfer(0, 1, 2),),
        block_loads=(BlockTransfer(0, 3, 4),),
        block_copies=(BlockCopy(0, 1, 2),),
        adapter_copies=(AdapterCopy(3, (0, 1)),),
    )
    result = StepResult(
        9,
        (
            RowResult(0, (7,), (LOGPROB,), (LOGPROB,), error=ErrorInfo("row_failed", "hm")),
            RowResult(1, (7, 8), forced_token_ids=(9,), logits=LogitsFile("/tmp/a", 2)),
            RowResult(2, candidates=((3, -0.5), (1, -math.inf))),
            RowResult(3, prompt_logits=LogitsFile("/tmp/b", 100)),
            RowResult(4, pooled=bytes(range(8))),
        ),
        (3,),
        ((4, ErrorInfo("adapter_load_failed", "hm")),),
        StepTiming(1, 2, 3),
    )
    for thing in (plan, result):
        wire = msgspec.msgpack.encode(thing)
        assert msgspec.msgpack.decode(wire, type=type(thing)) == thing


def test_blocks_are_moved_in_groups_with_the_names_of_earlier_journals():
    plan = StepPlan(1, block_loads=(BlockTransfer(2, 3, 4),), block_copies=(BlockCopy(1, 0, 5),))
    assert msgspec.json.decode(msgspec.json.encode(plan)) == {
        "step_id": 1,
        "block_loads": [{"kv_group": 2, "device_block": 3, "host_block": 4}],
        "block_copies": [{"kv_group": 1, "source": 0, "target": 5}],
    }
