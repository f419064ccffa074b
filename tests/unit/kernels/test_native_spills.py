"""The innermost loops of the linear keep their sums in registers: no vector goes to the stack.

A compiler that spills one costs half of the speed and changes no result: only this test finds it.
"""

import re
import shutil
import subprocess
from collections import Counter

import pytest

from loraplex.kernels.native.library import LIBRARY_FOLDER

_FUNCTION = re.compile(r"[0-9a-f]+ <(.+)>:")
_VECTOR_ON_STACK = re.compile(r"%[xyz]mm.*\(%r[sb]p\)|\(%r[sb]p\).*%[xyz]mm")
# Pointers, which a compiler moves through vector registers before a loop.
_POINTER = re.compile(r"\tvmovq ")
_HOT_LOOP = re.compile(r"loraplex::(Float|Quantized|Paired|Byte|Dot)Block<.*>::run\(")
_FEWEST_HOT_LOOPS = 30


def spilled_vectors(listing: str) -> Counter[str]:
    """Instructions that move a vector to or from the stack, for each hot loop of objdump's text."""
    counts: Counter[str] = Counter()
    function = ""
    for line in listing.splitlines():
        if found := _FUNCTION.match(line):
            function = found[1]
            if _HOT_LOOP.search(function):
                counts[function] = 0
        elif function in counts and _VECTOR_ON_STACK.search(line) and not _POINTER.search(line):
            counts[function] += 1
    return counts


def test_a_spill_is_found() -> None:
    name = "loraplex::FloatBlock<float>::Of<6, 1>::run(float const*)"
    listing = f"""
0000000000001000 <{name}>:
    1000:\tvmovaps %ymm1,0x20(%rsp)
    1008:\tvmovaps -0x20(%rbp),%ymm3
    1010:\tmov    %rax,0x8(%rsp)
    1014:\tvmovq  %xmm1,0x8(%rsp)
    1018:\tvfmadd231ps (%rax),%ymm1,%ymm2
0000000000002000 <loraplex::other()>:
    2000:\tvmovaps %ymm1,0x20(%rsp)
"""
    assert spilled_vectors(listing) == {name: 2}


@pytest.mark.parametrize("library", ["libloraplex_v3.so", "libloraplex_v4.so"])
def test_no_hot_loop_spills(library: str) -> None:
    path, objdump = LIBRARY_FOLDER / library, shutil.which("objdump")
    if objdump is None or not path.exists():
        pytest.skip("needs objdump and a library for x86-64")
    command = [objdump, "--disassemble", "--demangle", "--no-show-raw-insn", str(path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = spilled_vectors(listing)
    if not counts:
        pytest.skip("the library was stripped of its symbols")
    assert len(counts) >= _FEWEST_HOT_LOOPS
    assert {name: count for name, count in counts.items() if count} == {}
