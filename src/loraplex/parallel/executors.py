"""What starts the ranks of an engine, wherever they run."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from loraplex.parallel.messages import RankStart


class RankEnd(NamedTuple):
    """End of a rank that was not stopped."""

    rank: int
    how: str
    """End of a sentence that begins with the rank."""
    is_kill: bool = False
    """Whether something outside killed it, such as a system short of memory."""

    def __str__(self) -> str:
        return f"rank {self.rank} {self.how}"


class Executor(Protocol):
    """Starts all ranks but rank 0, and watches them."""

    @property
    def host(self) -> str:
        """Address of this machine for ranks on other machines; empty: all ranks are on this one."""
        ...

    def start(self, starts: Sequence[RankStart], ended: Callable[[RankEnd], None]) -> None:
        """Start the ranks, and return before they are ready. Raises ConfigError.

        ended: called from any thread when a rank has ended.
        """
        ...

    def stop(self, seconds: float) -> None:
        """Let the ranks end by themselves for so long, then end them. Then all are gone."""
        ...
