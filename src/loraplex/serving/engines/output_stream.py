"""Queue of the outputs of one request, from its engine to its reader."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from loraplex.core.output import EngineOutput
from loraplex.serving.logits_files import discard


class EngineOutputs(Protocol):
    """The outputs of one request as a generation reads them; `OutputStream` is one."""

    async def take(self) -> list[EngineOutput]: ...

    def leave(self) -> None: ...


class OutputStream:
    """The outputs of one request. A slow reader finds them merged; it never holds a step back."""

    def __init__(self) -> None:
        self._pending: list[EngineOutput] = []
        self._filled = asyncio.Event()
        self._is_left = False
        self._pass_on: Callable[[EngineOutput], None] | None = None

    def put(self, output: EngineOutput) -> None:
        if self._is_left:
            discard((output,))
        elif self._pass_on is not None:
            self._pass_on(output)
        else:
            self._pending.append(output)
            self._filled.set()

    async def take(self) -> list[EngineOutput]:
        """All outputs since the last call; waits for at least one. None follow a finished one."""
        await self._filled.wait()
        self._filled.clear()
        outputs, self._pending = self._pending, []
        return outputs

    def pass_on(self, pass_on: Callable[[EngineOutput], None]) -> None:
        """Call a function with each output, from the first on; `take` is not called then."""
        for output in self._pending:
            pass_on(output)
        self._pending = []
        self._pass_on = pass_on

    def leave(self) -> None:
        """Give up reading: outputs, present and future, are dropped, and their files deleted."""
        self._is_left = True
        discard(self._pending)
        self._pending = []
