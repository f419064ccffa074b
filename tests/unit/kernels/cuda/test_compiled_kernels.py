"""Every kernel compiles ahead of time for Hopper and Ampere, and the machine code is as wanted.

Compiled with the Triton that is installed, and with the oldest one that loraplex supports where
`make test` has put it. What is compiled are the launches of testing/kernel_cases.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import kernel_cases

_OLDEST = Path(sys.prefix) / "triton-3.6.0"
_HERE = "installed"
_HOPPER, _AMPERE = 90, 80
_USUAL = "--match=8b bf16"
_FEWEST = "--fewest"
"""CI compiles what is usual with each value of a constant once: for Hopper with the installed
Triton, and for Ampere with the oldest one. `make soak` compiles the combinations, and all cases.
"""


@dataclasses.dataclass(frozen=True)
class Limit:
    registers: int
    """Registers of a thread: 255 is what there is, and 128 lets a processor hold 16 warps."""
    wide_share: float = 0.0
    """Share of the bits of global loads that must come 128 at a time. Main paths have one; the
    rest are indices, and what lies scattered."""


LIMITS = {
    # LoRA
    "shrink_few": Limit(128, 0.75),
    "expand_few": Limit(136, 0.7),
    "shrink_many": Limit(184, 0.85),
    "expand_many": Limit(224, 0.7),
    "add_vectors": Limit(64, 0.7),
    # Attention
    "write_kv": Limit(64, 0.75),
    "decode_grouped": Limit(192, 0.75),
    "decode_single": Limit(160, 0.75),
    "merge_shares": Limit(48, 0.6),
    "prefill": Limit(255, 0.7),
    "attend_chunks": Limit(255, 0.7),
    "fold_chunks": Limit(64, 0.45),
    # Between the products
    "take_rows": Limit(32, 0.6),
    "norm without bias": Limit(48, 0.85),
    "add_norm without bias": Limit(64, 0.85),
    "rotary": Limit(48, 0.6),
    "gate": Limit(40, 1.0),
    "add": Limit(40, 1.0),
    "scale": Limit(40, 1.0),
    "norm": Limit(72, 1.0),
    "add_norm": Limit(88, 1.0),
    "activate": Limit(40, 1.0),
    "multiply": Limit(40, 1.0),
    "store_inputs": Limit(40, 0.66),
    "causal_conv": Limit(96, 0.5),
    # Recurrences
    "recurrence": Limit(192, 0.5),
    "gated_norm": Limit(48, 0.9),
    "sigmoid_gate": Limit(40, 0.9),
    # Products
    "quantized_linear": Limit(255, 0.6),
    "add_splits": Limit(48, 1.0),
    "add_shares": Limit(48, 1.0),
    "quantize_rows": Limit(48, 1.0),
    "invariant_linear": Limit(136, 0.25),
    # Experts
    "choose_experts": Limit(80),
    "sort_pairs": Limit(96),
    "combine_experts": Limit(40, 0.75),
    "shrink_few_of_experts": Limit(128, 0.75),
    "expand_few_of_experts": Limit(136, 0.7),
    "spread_users": Limit(40),
    "shrink_many_of_experts": Limit(152, 0.75),
    "expand_many_of_experts": Limit(112, 0.7),
    "grouped_linear": Limit(168, 0.85),
    "grouped_quantized_linear": Limit(248, 0.8),
    # Sampling
    "argmax_of_splits": Limit(72, 0.6),
    "argmax_of_rows": Limit(24),
    "apply_bitmask": Limit(32),
    "extremes_of_splits": Limit(48, 0.75),
    "tally": Limit(96),
    "gather": Limit(96),
    "cut": Limit(80),
    "sum_splits": Limit(96),
    "draw": Limit(104),
    "order_tokens": Limit(40, 0.75),
    "finish": Limit(48),
}

SHARES_OF_CASES = {
    "decode 16x64": {"quantized_linear": 0.45},
    "int8 kv": {"decode_grouped": 0.3, "prefill": 0.25, "attend_chunks": 0.4},
    "fp8": {"grouped_linear": 0.25},
    "int4": {"grouped_quantized_linear": 0.45},
    "stored int8": {"grouped_quantized_linear": 0.55},
    "of 16": {"quantized_linear": 0.0, "grouped_quantized_linear": 0.0},
    "table": {"quantized_linear": 0.1, "grouped_quantized_linear": 0.05},
    "table of 16": {"quantized_linear": 0.0},
    "table of 64 fp32": {"quantized_linear": 0.0},
}
"""Instead of `wide_share`: of 8 or 4 bits a thread loads 8 bytes, and there are scales. Groups of
16 have short loads, and each number of a table has a load of 16 bits:
in float32 the words have no wider ones."""


NARROW_HEADS = "heads of 64"
"""Cases without a `wide_share`: their vectors are too short for the threads of a program."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("kernel compiler")
@pytest.mark.parametrize(
    ("arch", "flags"),
    [
        (_HOPPER, [_USUAL, _FEWEST]),
        pytest.param(_HOPPER, [], marks=pytest.mark.soak),
        pytest.param(_AMPERE, [_USUAL], marks=pytest.mark.soak),
    ],
)
def test_every_kernel_compiles_within_its_limits(arch: int, flags: list[str]) -> None:
    found = _compile(arch, _HERE, *flags)
    assert not {kernel["kernel"] for kernel in found} - LIMITS.keys(), "kernels without a limit"
    problems = [problem for kernel in found for problem in _problems(kernel)]
    assert not problems, "\n".join(problems)
    if not flags:
        assert {kernel["kernel"] for kernel in found} == LIMITS.keys()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("kernel compiler")
@pytest.mark.parametrize(
    ("arch", "flags"),
    [
        (_AMPERE, [_USUAL, _FEWEST]),
        pytest.param(_HOPPER, [_USUAL], marks=pytest.mark.soak),
    ],
)
def test_the_oldest_triton_compiles_every_kernel(arch: int, flags: list[str]) -> None:
    """The limits are those of the installed one, which serves unless an operator pins another."""
    found = _compile(arch, _OLDEST.name, *flags)
    assert not [kernel["error"][-500:] for kernel in found if kernel["resources"] is None]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("kernel compiler")
def test_what_is_launched_is_what_a_gpu_would_compile() -> None:
    """Integers that 16 divides, and pointers that are aligned, are known to be so."""
    kernels = _compile(_HOPPER, _HERE, _USUAL, _FEWEST)
    rotary = next(
        kernel
        for kernel in kernels
        if kernel["kernel"] == "rotary" and "8b bf16 1 tokens" in kernel["cases"][0]
    )
    assert set(rotary["resources"]["load_bits"]) == {"128"}
    assert rotary["resources"]["registers"] > 0
    assert rotary["group"] == "elementwise"


def test_all_groups_are_compiled() -> None:
    modules = {path.stem for path in Path(kernel_cases.__file__).parent.glob("*.py")}
    assert modules - {"__init__", "llamas", "routers"} == set(kernel_cases.GROUPS)


@functools.cache
def _compile(arch: int, triton: str, *flags: str) -> list[dict[str, Any]]:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    if triton != _HERE:
        if not _OLDEST.is_dir():
            pytest.skip(f"{_OLDEST} is missing: make {_OLDEST.relative_to(Path.cwd())}")
        environment["PYTHONPATH"] = os.pathsep.join([str(_OLDEST), os.environ["PYTHONPATH"]])
    command = [sys.executable, "-m", "support.kernel_compiler"]
    done = subprocess.run(
        [*command, f"--arch={arch}", "--json", *flags],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    if triton != _HERE:
        assert report["triton"] == triton.removeprefix("triton-")
    kernels: list[dict[str, Any]] = report["kernels"]
    for kernel in kernels:
        if "norm" in kernel["kernel"] and kernel["constants"].get("HAS_BIAS") == "False":
            kernel["kernel"] += " without bias"
    return kernels


def _problems(kernel: dict[str, Any]) -> list[str]:
    name = f"{kernel['kernel']} ({kernel['cases'][0]})"
    used, limit = kernel["resources"], LIMITS[kernel["kernel"]]
    if used is None:
        return [f"{name} does not compile: {kernel['error'][-500:]}"]
    problems = []
    if used["registers"] > limit.registers:
        problems.append(f"{name} takes {used['registers']} registers, not {limit.registers}")
    if used["spill_bytes"] or used["stack_bytes"]:
        problems.append(f"{name} spills {used['spill_bytes']} bytes, stack {used['stack_bytes']}")
    share = _wide_share(used["load_bits"])
    least = limit.wide_share
    for part, shares in SHARES_OF_CASES.items():
        if part in kernel["cases"][0]:
            least = shares.get(kernel["kernel"], least)
    if NARROW_HEADS in kernel["cases"][0]:
        least = 0.0
    if share < least:
        problems.append(f"{name}: {share:.0%} of its loads are 128 wide: {used['load_bits']}")
    return problems


def _wide_share(load_bits: dict[str, int]) -> float:
    total = sum(int(bits) * count for bits, count in load_bits.items())
    return 128 * load_bits.get("128", 0) / total if total else 1.0
