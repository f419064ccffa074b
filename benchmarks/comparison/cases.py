"""What a comparison measures: the workloads W1 to W6 by name.

A stage is what one start of a server is good for: systems are started once for it, with the
adapters that it needs. Large models have short forms of W1 to W4 (comparison.sizes).
"""

from collections.abc import Sequence

import msgspec

from comparison.first_use import FirstUse
from comparison.held_streams import HeldStreams
from comparison.sizes import STANDARD, Sizes
from comparison.traces import PunicaTrace, SloraTrace
from loraplex.bench.arrivals import Burst, ClosedLoop
from loraplex.bench.popularity import (
    BaseOnly,
    Distinct,
    Geometric,
    Identical,
    Popularity,
    Shuffled,
    SquareRoot,
)
from loraplex.bench.workload import Lengths, Workload
from loraplex.core.errors import ConfigError

NUM_ADAPTERS = STANDARD.num_adapters
_FEW = 5
_TAX_COUNTS = (1, 2, 4, 8, 16)
_NUM_CLIENTS = 32
_NUM_RESIDENT_FROM_DISK = 100

Load = Workload | SloraTrace | PunicaTrace


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to measure."""

    name: str
    load: Load | FirstUse | HeldStreams

    @property
    def uses_adapters(self) -> bool:
        """Whether wrong outputs in mixed batches invalidate it."""
        is_base = isinstance(self.load, Workload) and isinstance(self.load.popularity, BaseOnly)
        return not (is_base or isinstance(self.load, HeldStreams))


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Cases for one start of a server."""

    name: str
    num_adapters: int
    """Adapters of rank 8, known from the start."""
    num_resident: int
    """Adapters in memory."""
    max_lora_rank: int
    cases: tuple[Case, ...]


def stages(groups: Sequence[str], num_many: int, seed: int, sizes: Sizes = STANDARD) -> list[Stage]:
    """The stages of the named groups, or of single workloads such as W3-8. Raises ConfigError.

    num_many: adapters of W6's large side.
    """
    plain, unknown = [], []
    known = SHORT_GROUPS if sizes.is_short else GROUPS
    for group in groups:
        family = group.partition("-")[0]
        cases = [case for case in _plain_cases(family, seed, sizes) if group in (family, case.name)]
        plain += cases
        if family not in known or not (cases or group in ("W5", "W6")):
            unknown.append(group)
    if unknown:
        raise ConfigError(
            f"the workloads are {', '.join(known)}, or one of a group, such as W3-8; "
            f"{', '.join(unknown)} is none"
        )
    found = []
    if plain:
        found.append(_stage("standard", sizes.num_adapters, sizes.num_adapters, plain))
    if "W5" in groups:
        found.append(_first_use_stage())
    if "W6" in groups:
        disk = min(num_many, _NUM_RESIDENT_FROM_DISK)
        many = [*_many_cases(num_many, seed), *_trace_cases(num_many)]
        found.append(_stage("many, resident", num_many, num_many, many))
        found.append(_stage("many, from disk", num_many, disk, _many_cases(num_many, seed)))
    return found


SHORT_GROUPS = ("W1", "W2", "W3", "W4", "held")
GROUPS = (*SHORT_GROUPS, "W5", "W6", "tax")


def _stage(name: str, num_adapters: int, num_resident: int, cases: list[Case]) -> Stage:
    return Stage(
        name=name,
        num_adapters=num_adapters,
        num_resident=num_resident,
        max_lora_rank=8,
        cases=tuple(cases),
    )


def _plain_cases(group: str, seed: int, sizes: Sizes) -> list[Case]:
    match group:
        case "W1":
            count, *lengths = sizes.stream
            prompt, output = (Lengths(length, length) for length in lengths)
            load = _load(count, prompt, output, BaseOnly(), seed, clients=1)
            return [Case(name="W1", load=load)]
        case "W2" | "W3":
            popularity = BaseOnly() if group == "W2" else Distinct()
            return [
                _together(f"{group}-{count}", count, popularity, seed, sizes, sizes.num_adapters)
                for count in sizes.stream_counts
            ]
        case "W4":
            load = _load(*sizes.mix, Distinct(), seed, num_adapters=sizes.num_adapters)
            return [Case(name="W4", load=load)]
        case "held":
            return [Case(name="held", load=sizes.held)]
        case "tax":
            return [
                _together(f"tax-{count}", 32, Distinct(), seed, sizes, count)
                for count in _TAX_COUNTS
            ]
        case _:
            return []


def _together(
    name: str,
    count: int,
    popularity: Popularity,
    seed: int,
    sizes: Sizes,
    num_adapters: int,
) -> Case:
    """`count` requests at once, all of one length."""
    prompt, output = (Lengths(length, length) for length in sizes.together)
    load = _load(count, prompt, output, popularity, seed, num_adapters=num_adapters)
    return Case(name=name, load=load)


def _load(
    num_requests: int,
    prompt_tokens: Lengths,
    output_tokens: Lengths,
    popularity: Popularity,
    seed: int,
    *,
    clients: int | None = None,
    num_adapters: int = NUM_ADAPTERS,
) -> Workload:
    return Workload(
        num_requests=num_requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        popularity=popularity,
        num_adapters=num_adapters,
        arrivals=Burst() if clients is None else ClosedLoop(clients),
        seed=seed,
    )


def _first_use_stage() -> Stage:
    cases = tuple(
        Case(
            name=f"W5-r{rank}-{'known' if is_known else 'new'}",
            load=FirstUse(rank=rank, is_known=is_known),
        )
        for rank in (8, 64)
        for is_known in (False, True)
    )
    return Stage(name="first use", num_adapters=0, num_resident=8, max_lora_rank=64, cases=cases)


def _many_cases(num_many: int, seed: int) -> list[Case]:
    """A closed loop at saturation: few adapters against many, each of these drawn twice."""
    return [
        Case(
            name=f"W6-n{count}",
            load=_load(
                2 * num_many,
                Lengths(16, 16),
                Lengths(16, 16),
                Shuffled(),
                seed,
                clients=_NUM_CLIENTS,
                num_adapters=count,
            ),
        )
        for count in (_FEW, num_many)
    ]


def _trace_cases(num_many: int) -> list[Case]:
    """The generators, at rates and lengths that a processor can serve."""
    slora = [
        Case(
            name=f"W6-s-lora-alpha{alpha:g}-cv{cv:g}",
            load=SloraTrace(
                num_adapters=num_many,
                alpha=alpha,
                cv=cv,
                requests_per_second=4.0,
                seconds=60.0,
                prompt_tokens=(8, 128),
                output_tokens=(8, 64),
            ),
        )
        for alpha, cv in ((1.0, 1.0), (0.3, 1.0), (1.0, 4.0))
    ]
    laws: tuple[Popularity, ...] = (Identical(), SquareRoot(), Geometric(1.5), Distinct())
    punica = [
        Case(
            name=f"W6-punica-{law}",
            load=PunicaTrace(
                popularity=law, num_adapters=num_many, num_requests=128, max_model_len=256
            ),
        )
        for law in laws
    ]
    return [*slora, *punica]
