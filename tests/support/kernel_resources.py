"""What a compiled kernel needs and does, read from its machine code by NVIDIA's own tools."""

import collections
import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path

import triton

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE
)
_MATRIX_OPS = ("HMMA", "HGMMA", "IMMA", "IGMMA", "QGMMA", "DMMA")
_DEFAULT_BITS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class KernelResources:
    """Counts of instructions are of the code, not of what is executed: a loop counts once."""

    registers: int
    """Registers of each thread."""
    stack_bytes: int
    """Stack of each thread: values that did not fit into registers, and arrays."""
    spill_bytes: int
    """Bytes that instructions store to the stack and load from it."""
    shared_bytes: int
    """Shared memory of each program."""
    load_bits: dict[int, int]
    """Instructions that load global memory, by the width of what one thread loads."""
    matrix_ops: dict[str, int]

    @property
    def wide_share(self) -> float:
        """Return the share of loaded bits that come from 128-bit loads."""
        total = sum(bits * count for bits, count in self.load_bits.items())
        return self.load_bits.get(128, 0) * 128 / total if total else 1.0


def resources_of(cubin: bytes, shared_bytes: int) -> KernelResources:
    """Return the resources of a compiled kernel. shared_bytes: dynamic size at the launch."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _USAGE.search(_output("cuobjdump", "-res-usage", file.name))
        code = _output("nvdisasm", "-c", file.name)
    assert usage, "cuobjdump reports no resource usage"
    registers, stack, static, local = map(int, usage.groups())
    loads: collections.Counter[int] = collections.Counter()
    matrix: collections.Counter[str] = collections.Counter()
    spilled = 0
    for instruction in _INSTRUCTION.findall(code):
        name, *modifiers = instruction.split(".")
        match name:
            case "LDG" | "LDGSTS":
                loads[_bits(modifiers)] += 1
            case "STL" | "LDL":
                spilled += _bits(modifiers) // 8
            case _ if name in _MATRIX_OPS:
                matrix[name] += 1
    return KernelResources(
        registers,
        stack + local,
        spilled,
        max(static, shared_bytes),
        dict(loads),
        dict(matrix),
    )


def _bits(modifiers: list[str]) -> int:
    """Return the width of one thread's access, which the name omits if it is 32."""
    widths = [
        int(word.lstrip("US")) for word in modifiers if re.fullmatch(r"[US]?(8|16|64|128)", word)
    ]
    return widths[-1] if widths else _DEFAULT_BITS


def _output(tool: str, *arguments: str) -> str:
    command = [str(_TOOLS / tool), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
