"""Steps of one shape as programs: their native calls, recorded once and repeated by one call.

A step makes the same calls as the last one of its size, with other inputs. `Recorder` records the
calls. Each op declares which of its arguments are values of the step (library.Value);
the others stay. A value is one of the parameters that the decoder names, or the output of an
earlier op, or a view of one. If a call has any other value, such as a tensor that torch made, the
step has no program and is computed each time. Outputs get places in a memory that all programs
share, since one runs at a time.
"""

import bisect
import dataclasses
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loraplex.kernels.native.library import (
    NativeFunction,
    NativeLibrary,
    Pointer,
    Real,
    Size,
    Source,
    Value,
)

_ALIGNMENT = 64


@dataclasses.dataclass(slots=True)
class _OpCall:
    op: int
    words: list[int]
    values: tuple[int, ...]
    """Indices of the words that are addresses of values."""
    fixed: tuple[int, ...]
    """Indices of the words that are addresses of what stays."""
    num_outputs: int
    """Number of outputs that there were when it was made, its own included."""


@dataclasses.dataclass(slots=True)
class _OpOutput:
    """Output of an op, and the calls between which it is needed."""

    start: int
    end: int
    number: int
    first_call: int
    last_call: int
    offset: int = 0


class StepProgram:
    """The calls of one recording."""

    def __init__(
        self,
        run: NativeFunction,
        code: npt.NDArray[np.int64],
        result: torch.Tensor,
        memory: torch.Tensor,
    ) -> None:
        """memory: for the outputs of the calls. What else they point into is kept by the key."""
        self._run = run
        self._code = code
        self._code_address = code.ctypes.data
        self._memory = memory
        self.result = result

    def run(self, parameters: Sequence[int]) -> torch.Tensor:
        """Make the calls with these addresses; the result is overwritten by the next program."""
        values = (Size * len(parameters))(*parameters)
        self._run(self._code_address, len(self._code), values, len(parameters))
        return self.result


class Recorder:
    """Notes the calls of a library's functions while `record` computes something."""

    def __init__(self, library: NativeLibrary) -> None:
        self._op_number = library.size_function("loraplex_program_op", Pointer)
        self._run = library.function("loraplex_run_program", Pointer, Size, Pointer, Size)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._is_recording = False
        self._is_complete = True
        self._calls: list[_OpCall] = []
        self._outputs: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory for the outputs."""
        return len(self._memory)

    def watch(self, name: str, function: NativeFunction, types: Sequence[Any]) -> NativeFunction:
        """Return the function, recorded at each call. One that no program may hold prevents it."""
        op = self._op_number(name.encode())
        values, fixed, sources = (
            tuple(index for index, kind in enumerate(types) if kind is role)
            for role in (Value, Pointer, Source)
        )
        reals = frozenset(index for index, kind in enumerate(types) if kind is Real)

        def watched(*arguments: Any) -> None:
            function(*arguments)
            if self._is_recording:
                words = [_word(value, i in reals) for i, value in enumerate(arguments)]
                made = tuple(index for index in sources if self._is_output(words[index]))
                kept = tuple(index for index in sources if index not in made)
                self._calls.append(
                    _OpCall(op, words, values + made, fixed + kept, len(self._outputs))
                )
                self._is_complete &= op >= 0

        return watched

    def output(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note the new tensor that an op is about to write."""
        if self._is_recording:
            self._outputs.append(tensor)
        return tensor

    def record(
        self, parameters: Sequence[int], compute: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, StepProgram | None]:
        """Return the result of compute, and its program if its calls give that result."""
        assert not self._is_recording, "a recording in a recording"
        self._calls, self._outputs = [], []
        self._is_recording = self._is_complete = True
        try:
            result = compute()
        finally:
            self._is_recording = False
        calls, outputs = self._calls, self._outputs
        self._calls, self._outputs = [], []
        used = _uses(calls, outputs)
        numbers = {address: number for number, address in enumerate(parameters) if address}
        # Else it has a step that no program repeats, such as a tensor of torch at its end.
        of_calls = any(use.start == result.data_ptr() and use.last_call >= 0 for use in used)
        if not (self._is_complete and of_calls and _knows_values(calls, used, numbers)):
            return result, None
        return result, self._program(calls, used, numbers, result)

    def _program(
        self,
        calls: list[_OpCall],
        used: list[_OpOutput],
        numbers: Mapping[int, int],
        result: torch.Tensor,
    ) -> StepProgram:
        (of_result,) = (use for use in used if use.start == result.data_ptr())
        of_result.last_call = len(calls)
        memory = self._memory_of(_place(used))
        code = np.array(_code(calls, used, memory.data_ptr(), numbers), dtype=np.int64)
        place = memory[of_result.offset : of_result.offset + result.nbytes]
        return StepProgram(self._run, code, place.view(result.dtype).view(result.shape), memory)

    def _is_output(self, address: int) -> bool:
        """Whether an op of this recording has written there."""
        starts = ((tensor.data_ptr(), tensor.nbytes) for tensor in self._outputs)
        return any(start <= address < start + num_bytes for start, num_bytes in starts)

    def _memory_of(self, num_bytes: int) -> torch.Tensor:
        """Return enough memory. Earlier programs keep the smaller one that they use."""
        if num_bytes > len(self._memory):
            memory = torch.zeros(2 * num_bytes + _ALIGNMENT, dtype=torch.uint8)
            self._memory = memory[-memory.data_ptr() % _ALIGNMENT :]
        return self._memory


def _word(value: Any, is_real: bool) -> int:
    if is_real:
        (word,) = struct.unpack("=i", struct.pack("=f", value))
        return int(word)
    return 0 if value is None else int(value)


def _uses(calls: Sequence[_OpCall], outputs: Sequence[torch.Tensor]) -> list[_OpOutput]:
    """Return each output's memory, with that of its views, and its first and last call."""
    used = [
        _OpOutput(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, number, len(calls), -1)
        for number, tensor in enumerate(outputs)
    ]
    used.sort(key=lambda output: output.start)
    for number, call in enumerate(calls):
        for index in call.values:
            output = _output_at(used, call.words[index])
            if output is not None:
                output.first_call = min(output.first_call, number)
                output.last_call = number
    return used


def _knows_values(
    calls: Sequence[_OpCall], used: Sequence[_OpOutput], numbers: Mapping[int, int]
) -> bool:
    """Whether each value is a parameter or an output, and nothing that stays is one."""

    def is_value(address: int, call: _OpCall) -> bool:
        output = _output_at(used, address)
        # The memory of a tensor that torch made and freed may be that of a later output.
        is_made = output is not None and output.number < call.num_outputs
        return address in numbers or is_made

    # A tensor without elements has the address 0, and nothing of it is read.
    values = ((call.words[index], call) for call in calls for index in call.values)
    fixed = ((call.words[index], call) for call in calls for index in call.fixed)
    known = all(not word or is_value(word, call) for word, call in values)
    return known and not any(is_value(word, call) for word, call in fixed)


def _output_at(used: Sequence[_OpOutput], address: int) -> _OpOutput | None:
    """used: in the order of their addresses."""
    index = bisect.bisect_right(used, address, key=lambda output: output.start) - 1
    return used[index] if index >= 0 and address < used[index].end else None


def _place(used: Sequence[_OpOutput]) -> int:
    """Assign each output the lowest offset that is free while it is needed; return all bytes."""
    alive: list[_OpOutput] = []  # in the order of their offsets
    size = 0
    for output in sorted(used, key=lambda output: output.first_call):
        alive = [other for other in alive if other.last_call >= output.first_call]
        for other in alive:
            end = output.offset + output.end - output.start
            if other.offset < end and output.offset < _end(other):
                output.offset = _end(other)
        bisect.insort(alive, output, key=lambda output: output.offset)
        size = max(size, _end(output))
    return size


def _end(output: _OpOutput) -> int:
    """Return the first aligned offset after an output."""
    end = output.offset + output.end - output.start
    return -(-end // _ALIGNMENT) * _ALIGNMENT


def _code(
    calls: Sequence[_OpCall], used: Sequence[_OpOutput], memory: int, numbers: Mapping[int, int]
) -> list[int]:
    """Encode the calls as native/include/loraplex/program.h describes."""
    code = []
    for call in calls:
        words, mask = list(call.words), 0
        for index in call.values:
            output = _output_at(used, words[index])
            if words[index] in numbers:
                words[index] = numbers[words[index]]
                mask |= 1 << index
            elif output is not None:
                words[index] += memory + output.offset - output.start
        code += [call.op, len(words), mask, *words]
    return code
