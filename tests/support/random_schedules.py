"""Requests alone, and in random schedules: their tokens and the bits of their logits must be equal.

A schedule is a real engine over one model: random arrivals, adapters, chunk sizes, aborts, and so
few blocks and adapter pages that sequences are preempted and adapters evicted. An engine may end in
the midst, and another continue its requests from their tokens so far.
"""

import dataclasses
import random
from collections.abc import Sequence

import msgspec
import torch

from loraplex.core.adapter import AdapterSource, AdapterUse, LoraTarget
from loraplex.core.clock import SystemClock
from loraplex.core.output import EngineOutput
from loraplex.core.plan import RowAdded, RowResult, RowStep, Slot, Wanted
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.task import Generate
from loraplex.engine.engine import Engine, build_engine
from loraplex.execution.adapters.host_adapters import HostAdapter, HostAdapters, HostWeight
from loraplex.execution.adapters.layout import pieces_of
from loraplex.execution.sampling.rows import num_logits_rows
from loraplex.execution.sampling.sampler import Sampler
from loraplex.execution.steps.model_runner import ModelRunner
from loraplex.execution.steps.runner_parts import RunnerParts
from loraplex.execution.steps.threaded_runner import ThreadedRunner
from loraplex.memory.adapter_pages import place
from loraplex.models.spec import ModelSpec
from support.instant_loader import InstantLoader

Bits = dict[int, int]
"""Hash of the logits by position."""
_NEVER = -1
_REPEATED_SHARE = 0.4
"""Share of the requests that repeat or extend the prompt of an earlier one."""


class RecordingSampler(Sampler):
    """Keeps the bits of the logits that each request's tokens are drawn from, by its seed."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, device=torch.device("cpu"))
        self.bits: dict[int, Bits] = {}
        self._seeds: dict[Slot, int] = {}

    def add_row(self, row: RowAdded) -> None:
        super().add_row(row)
        self._seeds[row.slot] = row.generation.seed

    def sample(self, logits: torch.Tensor, steps: Sequence[RowStep]) -> list[RowResult]:
        end = 0
        for step in steps:
            end += num_logits_rows(step)
            if step.wanted is Wanted.LAST:
                bits = hash(logits[end - 1].float().numpy().tobytes())
                of_request = self.bits.setdefault(self._seeds[step.slot], {})
                of_request[step.start + step.num_tokens - 1] = bits
        return super().sample(logits, steps)


class RandomAdapters(InstantLoader):
    """Adapters of random numbers."""

    def __init__(self, host: HostAdapters, config: ModelSpec, ranks: Sequence[int]) -> None:
        """Adapter i has ranks[i] on modules and experts of its own choice, applied strongly."""
        self._adapters = {
            f"adapter {index}": _random_adapter(f"adapter {index}", config, rank, index)
            for index, rank in enumerate(ranks)
        }
        super().__init__(host, self.make)

    def make(self, source: AdapterSource) -> HostAdapter:
        return self._adapters[source.digest]

    @property
    def sources(self) -> list[AdapterSource]:
        return [
            AdapterSource(digest, "", adapter.num_bytes, tuple(sorted(pieces_of(adapter))))
            for digest, adapter in self._adapters.items()
        ]


@dataclasses.dataclass(slots=True)
class Tally:
    """What happened in the schedules."""

    preemptions: int = 0
    cached_tokens: int = 0
    adapter_evictions: int = 0
    aborts: int = 0
    replays: int = 0
    """Requests that another engine continued after their first token."""
    steps: int = 0


class Schedules:
    """One model with a set of requests, each of which runs alone first."""

    def __init__(
        self,
        parts: RunnerParts,
        *,
        num_requests: int = 24,
        max_prompt_tokens: int = 40,
        max_tokens: int = 10,
        ranks: Sequence[int] = (8, 7, 8, 8),
    ) -> None:
        """parts.sampler is not used; parts.host_adapters is filled."""
        self.tally = Tally()
        self._samplers: list[RecordingSampler] = []
        """Samplers of the engines of one schedule."""
        self._parts = parts
        config = parts.decoder.spec
        self._adapters = RandomAdapters(parts.host_adapters, config, ranks)
        self._max_num_tokens = max_prompt_tokens + max_tokens
        draws = random.Random("requests")
        beginnings = [_tokens(draws, config, max_prompt_tokens // 2) for _ in range(2)]
        self._requests: list[EngineRequest] = []
        for index in range(num_requests):
            if index and draws.random() < _REPEATED_SHARE:
                earlier = draws.choice(self._requests)
                prompt, uses = earlier.prompt_token_ids, earlier.adapters
            else:
                prompt, uses = draws.choice([*beginnings, ()]), self._draw_uses(draws)
            max_more = max_prompt_tokens - len(prompt)
            prompt += _tokens(draws, config, draws.randint(not prompt, max_more))
            self._requests.append(
                _request(draws, index, prompt, draws.randint(2, max_tokens), uses)
            )
        self.alone = [self._run_alone(request) for request in self._requests]
        """Tokens and bits of each request."""

    def run(self, seed: object) -> list[str]:
        """Return the differences between this seed's schedule and lone requests; empty if none."""
        draws = random.Random(f"schedule {seed}")
        engine = self._random_engine(draws)
        requests = draws.sample(self._requests, draws.randint(2, min(12, len(self._requests))))
        arrivals = sorted((draws.randint(0, 12), index) for index in range(len(requests)))
        aborts = {draws.randint(1, 20): r.request_id for r in requests if draws.random() < 0.1}
        last_step = draws.choice([_NEVER, draws.randint(2, 20)])
        outputs: list[EngineOutput] = []
        step = 0
        while arrivals or not engine.is_idle:
            while arrivals and arrivals[0][0] <= step:
                engine.add(requests[arrivals.pop(0)[1]])
            if step in aborts:
                engine.abort(aborts[step])
            outputs += engine.step().outputs
            if step == last_step:
                self._leave(engine)
                engine = self._random_engine(draws)
                arrived = set(range(len(requests))) - {index for _, index in arrivals}
                self._replay(engine, [requests[index] for index in sorted(arrived)], outputs)
            step += 1
        engine.check()
        self._leave(engine)
        self.tally.aborts += len(aborts)
        problems = [p for request in requests for p in self._differences(request, outputs)]
        self._samplers.clear()
        return [f"schedule {seed}: {problem}" for problem in problems]

    def _replay(
        self, engine: Engine, requests: Sequence[EngineRequest], outputs: Sequence[EngineOutput]
    ) -> None:
        """Continue, as serving does after a crash, those whose last output is missing."""
        finished = {output.request_id for output in outputs if output.finished}
        for request in requests:
            if request.request_id not in finished:
                tokens, _ = _completion(request, outputs)
                self.tally.replays += bool(tokens)
                former = (tuple(tokens),)
                engine.add(msgspec.structs.replace(request, outputs=former, num_restarts=1))

    def _draw_uses(self, draws: random.Random) -> tuple[AdapterUse, ...]:
        digests = [source.digest for source in self._adapters.sources]
        chosen = draws.sample(digests, draws.choice([0, 1, 1, 1, 2]))
        return tuple(AdapterUse(digest, draws.choice([1.0, 0.5])) for digest in chosen)

    def _run_alone(self, request: EngineRequest) -> tuple[list[int], Bits]:
        settings = SchedulerSettings(enable_prefix_cache=False)
        engine = self._engine(self._parts, settings)
        engine.add(request)
        outputs: list[EngineOutput] = []
        while not engine.is_idle:
            outputs += engine.step().outputs
        engine.close()
        tokens, _ = _completion(request, outputs)
        return tokens, self._samplers.pop().bits[request.request_id]

    def _random_engine(self, draws: random.Random) -> Engine:
        capacity = self._parts.capacity
        least_blocks = -(-self._max_num_tokens // capacity.block_size)
        least_pages = 2 * max(
            place(source.targets, capacity.page_geometry).num_pages
            for source in self._adapters.sources
        )
        small = dataclasses.replace(
            self._parts,
            capacity=msgspec.structs.replace(
                capacity,
                cache_groups=tuple(
                    msgspec.structs.replace(
                        group,
                        num_blocks=min(
                            group.num_blocks, draws.randint(least_blocks, 3 * least_blocks)
                        ),
                    )
                    for group in capacity.cache_groups
                ),
                num_adapter_pages=min(
                    capacity.num_adapter_pages, draws.randint(least_pages, 3 * least_pages // 2)
                ),
                max_num_seqs=draws.randint(1, capacity.max_num_seqs),
            ),
        )
        settings = SchedulerSettings(
            max_num_batched_tokens=draws.choice([capacity.max_num_seqs, 17, 64, 512]),
            max_prefill_chunk=draws.choice([None, 1, 5, 16]),
            enable_prefix_cache=draws.random() < 0.7,
        )
        return self._engine(small, settings, overlap=draws.random() < 0.5)

    def _engine(
        self, parts: RunnerParts, settings: SchedulerSettings, *, overlap: bool = False
    ) -> Engine:
        sampler = RecordingSampler(parts.capacity.vocab_size)
        self._samplers.append(sampler)
        runner = ModelRunner(dataclasses.replace(parts, sampler=sampler))
        engine = build_engine(
            ThreadedRunner(runner) if overlap else runner,
            self._adapters,
            SystemClock(),
            settings,
            adapter_host_bytes=1 << 30,
            overlap=overlap,
        )
        for source in self._adapters.sources:
            engine.register_adapter(source)
        return engine

    def _leave(self, engine: Engine) -> None:
        stats, tally = engine.stats(), self.tally
        tally.preemptions += stats.preemptions
        tally.cached_tokens += stats.cached_tokens
        tally.steps += stats.steps
        tally.adapter_evictions += stats.adapters.device_evictions
        engine.close()
        self._adapters.poll()  # the loads of an engine die with it

    def _differences(self, request: EngineRequest, outputs: Sequence[EngineOutput]) -> list[str]:
        tokens, is_whole = _completion(request, outputs)
        expected, expected_bits = self.alone[request.request_id]
        name = f"request {request.request_id}"
        if tokens != expected[: len(tokens)] or (is_whole and tokens != expected):
            return [f"{name} gave {tokens}, alone {expected}"]
        # With overlap a row goes on once more after its last token.
        last = max(expected_bits)
        wrong = [
            position
            for sampler in self._samplers
            for position, bits in sampler.bits.get(request.request_id, {}).items()
            if position <= last and bits != expected_bits[position]
        ]
        return [f"{name} has other logits at positions {wrong}"] if wrong else []


def _request(
    draws: random.Random,
    index: int,
    prompt: tuple[int, ...],
    max_tokens: int,
    uses: tuple[AdapterUse, ...],
) -> EngineRequest:
    return EngineRequest(
        request_id=index,
        prompt_token_ids=prompt,
        task=Generate(
            SamplingParams(
                temperature=draws.choice([0.0, 0.0, 0.8]),
                max_tokens=max_tokens,
                ignore_eos=True,
                seed=index,
            )
        ),
        eos_token_ids=(),
        adapters=uses,
        kv_salt=repr(uses).encode(),
        tenant="",
        priority=draws.choice([0, 0, 1]),
        arrival_ns=index,
        deadline_ns=None,
    )


def _completion(request: EngineRequest, outputs: Sequence[EngineOutput]) -> tuple[list[int], bool]:
    """(tokens, whether the request came to its own end)"""
    own = [output for output in outputs if output.request_id == request.request_id]
    problems = [output.error for output in own if output.error is not None]
    assert not problems, f"request {request.request_id} failed: {problems[0]}"
    deltas = [delta for output in own for delta in output.deltas]
    tokens = [token for delta in deltas for token in delta.token_ids]
    return tokens, len(tokens) == request.sampling.max_tokens


def _tokens(draws: random.Random, config: ModelSpec, count: int) -> tuple[int, ...]:
    return tuple(draws.randrange(config.vocab_size) for _ in range(count))


def _random_adapter(digest: str, config: ModelSpec, rank: int, seed: int) -> HostAdapter:
    generator = torch.Generator().manual_seed(seed)
    weights = []
    for layer, shapes in enumerate(config.module_shapes):
        for module, (num_in, num_out) in shapes.items():
            for expert in range(config.num_experts[layer].get(module, 1)):
                if (seed + len(module) + expert) % 3 == 0:
                    continue
                a = torch.randn(rank, num_in, generator=generator) / num_in**0.5
                b = torch.randn(num_out, rank, generator=generator) / rank**0.5
                target = LoraTarget(layer, module, rank, num_in, num_out, expert=expert)
                weights.append(HostWeight(target, a, b, 0.3))
    return HostAdapter(digest, tuple(sorted(weights, key=lambda weight: weight.target)))
