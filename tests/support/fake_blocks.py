"""The KV blocks of a FakeRunner, and its error for a plan that breaks a rule."""

from loraplex.core.plan import StepPlan
from support.fake_model import EMPTY_STATE, State


class PlanViolation(AssertionError):
    """A plan broke a rule. It is kept in FakeRunner.violations, too: an engine survives it."""


def require(holds: bool, rule: str) -> None:
    if not holds:
        raise PlanViolation(rule)


def empty_blocks(num_blocks: int, block_size: int) -> list[list[State]]:
    return [[EMPTY_STATE] * block_size for _ in range(num_blocks)]


def move_blocks(
    plan: StepPlan, kv: list[list[list[State]]], host_kv: list[list[list[State]]]
) -> None:
    """Move the blocks of each cache group: offloads, loads, copies.

    Each kind reads everything before it writes.
    """
    named = {
        *(t.cache_group for t in (*plan.block_offloads, *plan.block_loads)),
        *(copy.cache_group for copy in plan.block_copies),
    }
    require(named <= set(range(len(kv))), "there is no such cache group")
    for group in sorted(named):
        offloads = [t for t in plan.block_offloads if t.cache_group == group]
        loads = [t for t in plan.block_loads if t.cache_group == group]
        copies = [(c.source, c.target) for c in plan.block_copies if c.cache_group == group]
        _move(kv[group], host_kv[group], [(t.device_block, t.host_block) for t in offloads])
        _move(host_kv[group], kv[group], [(t.host_block, t.device_block) for t in loads])
        _move(kv[group], kv[group], copies)


def _move(
    sources: list[list[State]], targets: list[list[State]], pairs: list[tuple[int, int]]
) -> None:
    """pairs: (source, target)"""
    target_ids = [target for _, target in pairs]
    require(len(set(target_ids)) == len(target_ids), "two transfers to one block")
    require(all(0 <= source < len(sources) for source, _ in pairs), "no such block")
    require(all(0 <= target < len(targets) for target in target_ids), "no such block")
    contents = [list(sources[source]) for source, _ in pairs]
    for target, content in zip(target_ids, contents, strict=True):
        targets[target] = content
