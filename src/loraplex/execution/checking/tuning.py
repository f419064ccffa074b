"""Measures what a card does best with: sizes of programs in place of the constants of ours.

Steps of the trial run once more, in the served model's shapes. Where a size (kernels.sizes) decides
a call, the call is repeated on the same inputs by backends with the other candidates. One that
raises, or gives something else, is out; of the others the fastest is chosen if it is faster by more
than measurements differ. The time is limited, and a size that was not measured whole stays ours.
"""

import contextlib
import functools
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import torch

from loraplex.kernels.ops import Kernels, Parameter
from loraplex.kernels.shadow import compared, copied, ops, unlike, written

TUNING_SECONDS: Final = 120.0
"""Maximum time of a tuning. It compiles each candidate for each kind of layer."""
LEAST_GAIN: Final = 0.05
"""A candidate must take this share of the time less than ours."""

_REPEATS: Final = 7
_FLUSHED_BYTES: Final = 512 << 20
"""Written before each measurement: weights come from memory as in a step, and not from a cache. It
takes longer than to launch a program, so the host does not delay what is measured."""

Measure = Callable[[Callable[[], object]], float]
"""Returns the seconds that work takes on the device."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was found of one candidate."""

    name: str
    """Which size, as in kernels.sizes."""
    size: str
    ratio: float | None = None
    """Time in relation to our own size; None: it was not measured whole."""
    problem: str = ""
    """Why it cannot be used."""


class Tuning(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sizes for one card and model."""

    sizes: dict[str, str] = {}
    """Those chosen in place of ours, by name."""
    measured: tuple[Measured, ...] = ()
    not_done: str = ""
    """What was not measured, or is not used, and why."""

    @property
    def described_sizes(self) -> str:
        return "; ".join(f"{name}: {size}" for name, size in self.sizes.items())

    @property
    def problems(self) -> list[str]:
        """Return what is wrong with candidates, a line for each."""
        return [f"{one.name} {one.size}: {one.problem}" for one in self.measured if one.problem]


class TuningKernels:
    """Implements `Kernels`: what a call gives is the result of our own sizes."""

    def __init__(
        self,
        kernels: Kernels,
        other: Callable[[str, str], Kernels],
        candidates: Mapping[str, Sequence[str]],
        measure: Measure,
        clock: Callable[[], float],
        begin: Callable[[str], None],
        *,
        is_quantized: bool,
        fallen: frozenset[str],
    ) -> None:
        """other: the backend with another size of this name. fallen: ops that torch computes.

        measure, clock: seconds. begin: receives what is about to run. is_quantized: weights are.
        """
        self.packed_layout = kernels.packed_layout
        self.lora_ns = None
        self._own = kernels
        self._other = functools.cache(other)
        self._candidates = candidates
        self._measure = measure
        self._clock = clock
        self._begin = begin
        self._is_quantized = is_quantized
        self._fallen = fallen
        self._deadline = clock() + TUNING_SECONDS
        self._step = ""
        self._seconds: dict[str, dict[str, dict[str, float]]] = {}
        """Time by name, step and size; our own is the empty one."""
        self._problems: dict[tuple[str, str], str] = {}
        self._seen: set[Hashable] = set()
        """Calls of shapes that were measured."""
        self._late: set[str] = set()
        """Sizes that the time did not allow."""
        for name in ops(TuningKernels):
            setattr(self, name, functools.partial(self._call, name))

    @contextlib.contextmanager
    def measuring(self, step: str) -> Iterator[None]:
        """Measure what is called meanwhile. Sizes count alike in each step that they decide."""
        self._step = step
        try:
            yield
        finally:
            self._step = ""

    def repeat(
        self,
        key: Hashable,  # noqa: ARG002
        parameters: Sequence[Parameter],  # noqa: ARG002
        compute: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        return compute()

    def recording(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def forget_recorded(self) -> None:
        pass

    def size_of(self, op: str, arguments: Sequence[Any]) -> str | None:
        return self._own.size_of(op, arguments)

    def result(self) -> Tuning:
        """Return what was measured, and the best size of each name."""
        measured = [
            self._found(name, size) for name in self._seconds for size in self._candidates[name]
        ]
        sizes: dict[str, str] = {}
        for name in self._seconds:
            ratios = {
                one.size: one.ratio
                for one in measured
                if one.name == name and one.ratio is not None and not one.problem
            }
            best = min(ratios, key=lambda size: ratios[size], default=None)
            if best is not None and ratios[best] <= 1 - LEAST_GAIN:
                sizes[name] = best
        late = ", ".join(sorted(self._late))
        return Tuning(
            sizes=sizes,
            measured=tuple(measured),
            not_done=f"no time was left for {late}" if late else "",
        )

    def _found(self, name: str, size: str) -> Measured:
        problem = self._problems.get((name, size), "")
        if problem or name in self._late:
            return Measured(name=name, size=size, problem=problem)
        ratios = [seconds[size] / seconds[""] for seconds in self._seconds[name].values()]
        return Measured(name=name, size=size, ratio=round(statistics.mean(ratios), 4))

    def _call(self, op: str, *arguments: Any, **options: Any) -> Any:
        own = getattr(self._own, op)
        name = self._own.size_of(op, arguments) if self._step and op not in self._fallen else None
        if name is None or name in self._late:
            return own(*arguments, **options)
        before = [copied(value, value) for value in arguments]
        result = own(*arguments, **options)
        expected = compared(result, written(op, arguments, arguments)[0])
        key = (name, self._step, op, _shapes(before), _shapes([expected]))
        if key not in self._seen:
            self._seen.add(key)
            self._compare(name, op, before, options, expected)
        return result

    def _compare(
        self, name: str, op: str, before: list[Any], options: dict[str, Any], expected: Any
    ) -> None:
        """Measure one call with our own size and with each candidate."""
        seconds = self._seconds.setdefault(name, {}).setdefault(self._step, {})
        for size in ("", *self._candidates[name]):
            if (name, size) in self._problems:
                continue
            if self._clock() > self._deadline:
                self._late.add(name)
                return
            kernels = self._other(name, size) if size else self._own
            self._begin(f"{op} with {name} {size or 'of ours'}")
            given = [copied(value, value) for value in before]
            work = functools.partial(getattr(kernels, op), *given, **options)
            try:
                found = compared(work(), written(op, given, given)[0])
                problem, _ = unlike(op, found, expected, is_quantized=self._is_quantized)
                took = 0.0 if problem else self._measure(work)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}".splitlines()[0]
            if problem:
                self._problems[name, size] = problem
            else:
                seconds[size] = seconds.get(size, 0.0) + took


def _shapes(values: Sequence[Any]) -> tuple[Hashable, ...]:
    return tuple(
        tuple(value.shape) if isinstance(value, torch.Tensor) else _shapes(value)
        for value in values
        if isinstance(value, torch.Tensor | tuple)
    )


def gpu_seconds(device: torch.device) -> Measure:
    """Return what measures on a GPU, by events in the current stream."""
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device)

    def seconds(work: Callable[[], object]) -> float:
        took = []
        for _ in range(_REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            flushed.zero_()
            begin.record()
            work()
            end.record()
            end.synchronize()
            took.append(float(begin.elapsed_time(end)) / 1e3)
        return statistics.median(took)

    return seconds
