"""Engine whose adapters change while it decodes; each token must equal that of an idle engine.

The requests use more adapters than fit on the device, so that nearly every request loads one.
The host holds only some of them, so that its pages are reused, too.
"""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

from loraplex.core.adapter import AdapterSource, AdapterUse
from loraplex.core.clock import SystemClock
from loraplex.core.output import EngineOutput
from loraplex.core.plan import Capacity
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.task import Generate
from loraplex.engine.engine import build_engine
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.loading import load_parts, start_runner
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.threaded_runner import ThreadedRunner
from loraplex.memory.adapter_pages import place
from loraplex.models.registry import read_config
from support.random_schedules import RandomAdapters

_PROMPT_TOKENS, _MAX_TOKENS = 12, 24


@dataclasses.dataclass(slots=True)
class ChurnReport:
    num_steps: int = 0
    num_completions: int = 0
    device_evictions: int = 0
    host_evictions: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)


class AdapterChurn:
    """One model and `num_adapters` random ones for it, of different ranks."""

    def __init__(
        self,
        folder: Path,
        settings: RunnerSettings,
        num_adapters: int,
        *,
        overlap: bool,
    ) -> None:
        host, config = HostAdapters(), read_config(folder)
        ranks = [1 + index % settings.max_lora_rank for index in range(num_adapters)]
        loader = RandomAdapters(host, config, ranks)
        parts = load_parts(folder, settings, host)
        runner = start_runner(parts, settings)
        loader.prepare = runner.prepare_adapter
        self._sources = loader.sources
        capacity = runner.capacity()
        sizes = [_host_bytes(source, capacity) for source in self._sources]
        self._engine = build_engine(
            ThreadedRunner(runner) if overlap and parts.accelerator is None else runner,
            loader,
            SystemClock(),
            SchedulerSettings(enable_prefix_cache=False),
            adapter_host_bytes=max(sum(sizes) // 2, max(sizes)),
            overlap=overlap,
        )
        for source in self._sources:
            self._engine.register_adapter(source)
        self._draws = random.Random("churn")
        self._prompts = [
            tuple(self._draws.randrange(config.vocab_size) for _ in range(_PROMPT_TOKENS))
            for _ in self._sources
        ]
        self._num_requests = 0

    def run(self, num_steps: int, *, num_running: int) -> ChurnReport:
        """So many requests at once, for at least so many steps; then the rest is finished."""
        engine = self._engine
        alone = [self._alone(index) for index in range(len(self._prompts))]
        before = engine.stats().adapters
        report, outputs, running = ChurnReport(), dict[int, list[int]](), dict[int, int]()
        while report.num_steps < num_steps or running:
            while report.num_steps < num_steps and len(running) < num_running:
                index = self._draws.randrange(len(self._prompts))
                running[self._add(index)] = index
            for output in engine.step().outputs:
                tokens = outputs.setdefault(output.request_id, [])
                tokens += _tokens([output])
                if output.finished:
                    index = running.pop(output.request_id)
                    self._compare(report, index, outputs.pop(output.request_id), alone[index])
            report.num_steps += 1
        engine.check()
        after = engine.stats().adapters
        report.device_evictions = after.device_evictions - before.device_evictions
        report.host_evictions = after.host_evictions - before.host_evictions
        return report

    def close(self) -> None:
        self._engine.close()

    def _alone(self, index: int) -> list[int]:
        self._add(index)
        outputs: list[EngineOutput] = []
        while not self._engine.is_idle:
            outputs += self._engine.step().outputs
        return _tokens(outputs)

    def _add(self, index: int) -> int:
        self._num_requests += 1
        use = AdapterUse(self._sources[index].digest)
        self._engine.add(
            EngineRequest(
                request_id=self._num_requests,
                prompt_token_ids=self._prompts[index],
                task=Generate(
                    SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS, ignore_eos=True)
                ),
                eos_token_ids=(),
                adapters=(use,),
                kv_salt=use.digest.encode(),
                tenant="",
                priority=0,
                arrival_ns=self._num_requests,
                deadline_ns=None,
            )
        )
        return self._num_requests

    @staticmethod
    def _compare(
        report: ChurnReport, index: int, tokens: Sequence[int], expected: Sequence[int]
    ) -> None:
        report.num_completions += 1
        if list(tokens) != list(expected):
            report.wrong.append(f"adapter {index} gave {tokens}, alone {expected}")


def _host_bytes(source: AdapterSource, capacity: Capacity) -> int:
    num_pages = place(source.targets, capacity.page_geometry).num_pages
    return num_pages * capacity.host_page_bytes or source.num_bytes


def _tokens(outputs: Sequence[EngineOutput]) -> list[int]:
    problems = [output.error for output in outputs if output.error is not None]
    assert not problems, f"a request failed: {problems[0]}"
    return [token for output in outputs for delta in output.deltas for token in delta.token_ids]
