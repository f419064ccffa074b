"""The KV blocks of a FakeRunner, and its error for a plan that breaks a rule."""

from support.fake_model import EMPTY_STATE, State


class PlanViolation(AssertionError):
    """A plan broke a rule. It is kept in FakeRunner.violations, too: an engine survives it."""


def require(holds: bool, rule: str) -> None:
    if not holds:
        raise PlanViolation(rule)


def empty_blocks(num_blocks: int, block_size: int) -> list[list[State]]:
    return [[EMPTY_STATE] * block_size for _ in range(num_blocks)]


def move(
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
