"""The original systems' own client programs and tests against this server.

    PYTHONPATH=tests python benchmarks/originals.py FOLDER

FOLDER is a checkout of triton-inference-server/tensorrtllm_backend that still has `all_models`
(v0.5.0 of October 2023 to May 2025), or a folder with several of them. Nothing of them is part of
loraplex: fetch them first. Each checkout's own model repository is served with the
shipped model, and its programs are started with the command lines of its README. Prints for each
program whether it passed, failed, or cannot run here and why; exit code 1 if one failed.
"""

import argparse
import contextlib
import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from loraplex.demo import BASE_PATH
from loraplex.testing.running_server import RunningServer, running
from support.triton_repositories import local_flags

MODELS: Final = Path("all_models", "inflight_batcher_llm")
DATASET: Final = (
    Path(__file__).parents[1] / "compat/tensorrtllm_backend/tools/dataset/capitals.json"
)
SECONDS: Final = 600
CLAMP: Final = 'parameters { key: "clamp_token_ids" value: { string_value: "true" } }\n'
"""Parameter that takes the random ids of token-norm-dist, which are beyond any vocabulary."""
_TOOLS: Final = "tools/inflight_batcher_llm"
_CLIENTS: Final = "inflight_batcher_llm/client"
_DATA: Final = "--dataset {dataset} --max-input-len 200"
_TOKENIZED: Final = "--tokenizer-dir {model} --tokenizer-type auto"
_RANDOM: Final = "--input-mean 20 --input-stdev 4 --output-mean 8 --output-stdev 2"


@dataclasses.dataclass(frozen=True)
class Program:
    """One program of a checkout, with its flags as the newest version spells them."""

    path: str
    arguments: str
    is_decoupled: bool = False


PROGRAMS: Final = (
    Program(f"{_TOOLS}/end_to_end_test.py", f"-i http -u {{http}} {_DATA}"),
    Program(f"{_TOOLS}/end_to_end_test.py", f"-i grpc -u {{grpc}} {_DATA}"),
    Program(f"{_TOOLS}/end_to_end_test.py", f"-i grpc -u {{grpc}} --test-bls {_DATA}"),
    Program(f"{_TOOLS}/identity_test.py", f"-i grpc -u {{grpc}} {_DATA} {_TOKENIZED}"),
    Program(
        f"{_TOOLS}/benchmark_core_model.py",
        f"-i grpc -u {{grpc}} --max-input-len 200 dataset --dataset {{dataset}} {_TOKENIZED}",
    ),
    Program(
        f"{_TOOLS}/benchmark_core_model.py",
        f"-i grpc -u {{grpc}} --max-input-len 200 --num-requests 20 token-norm-dist {_RANDOM}",
    ),
    Program(
        f"{_CLIENTS}/inflight_batcher_llm_client.py",
        f"-u {{grpc}} --request-output-len 8 {_TOKENIZED}",
    ),
    Program(
        f"{_CLIENTS}/inflight_batcher_llm_client.py",
        f"-u {{grpc}} --request-output-len 8 {_TOKENIZED} --streaming",
        is_decoupled=True,
    ),
    Program(f"{_CLIENTS}/end_to_end_grpc_client.py", "-u {grpc} -p Hello -o 8"),
    Program(
        f"{_CLIENTS}/end_to_end_grpc_client.py", "-u {grpc} -p Hello -o 8 -S", is_decoupled=True
    ),
    Program("tools/tests/test_fill_template.py", ""),
)


def main() -> int:
    """Run all programs of all checkouts; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="", help="checkout, or folder of checkouts")
    folder = parser.parse_args().folder
    if not folder:
        print("skipped: no checkouts of the originals are given: ORIGINALS=FOLDER names them")
        return 0
    root = Path(folder).resolve()
    checkouts = [each for each in (root, *sorted(root.iterdir())) if (each / MODELS).is_dir()]
    if not checkouts:
        print(f"{root} is no checkout of tensorrtllm_backend with {MODELS}, nor has one in it")
        return 1
    outcomes = [outcome for each in checkouts for outcome in run_checkout(each)]
    failed = sum(outcome.startswith("failed") for outcome in outcomes)
    passed = outcomes.count("passed")
    print(f"{passed} passed, {failed} failed, {len(outcomes) - passed - failed} not runnable")
    return 1 if failed else 0


def run_checkout(checkout: Path) -> Iterator[str]:
    """Run the programs of a checkout; yield what became of each."""
    for is_decoupled in (False, True):
        with serving(checkout, is_decoupled=is_decoupled) as server:
            for program in PROGRAMS:
                if program.is_decoupled is is_decoupled:
                    outcome = run_program(checkout, program, server)
                    line = f"{program.path} {program.arguments}".strip()
                    print(f"{checkout.name}: {line}: {outcome}", flush=True)
                    yield outcome


@contextlib.contextmanager
def serving(checkout: Path, *, is_decoupled: bool) -> Iterator[RunningServer]:
    """Serve the checkout's repository, of which two values are filled in."""
    with tempfile.TemporaryDirectory(prefix="loraplex-originals-") as scratch:
        repository = Path(scratch, "models")
        shutil.copytree(checkout / MODELS, repository)
        core = repository / "tensorrt_llm" / "config.pbtxt"
        text = core.read_text()
        for name, value in {
            "decoupled_mode": str(is_decoupled),
            "engine_dir": str(BASE_PATH),
        }.items():
            text = text.replace(f"${{{name}}}", value)
        core.write_text(text + CLAMP)
        command = [sys.executable, "-m", "loraplex", "compat", "triton"]
        command += ["--model-repository", str(repository), f"--log-file={scratch}/log.txt"]
        with running([*command, *local_flags(Path(scratch, "state"))]) as server:
            yield server


def run_program(checkout: Path, program: Program, server: RunningServer) -> str:
    """Run one program to its end; return `passed`, or why not."""
    script = checkout / program.path
    if not script.is_file():
        return "not runnable: this version has no such program"
    text = script.read_text()
    words = program.arguments.format(
        http=f"localhost:{server.http_port}",
        grpc=f"localhost:{server.grpc_port}",
        dataset=DATASET,
        model=BASE_PATH,
    ).split()
    words = [_in_its_form(word, text) for word in words]
    missing = [w for w in words if w.startswith("--") and w not in text]
    if missing:
        return f"not runnable: this version has no {missing[0]}"
    is_test = script.parent.name == "tests"
    starter = ["-m", "pytest", "-q", "-p", "no:cacheprovider"] if is_test else []
    try:
        ended = subprocess.run(
            [sys.executable, *starter, script, *words],
            # Tests import what is in the folder above.
            cwd=script.parent.parent if is_test else script.parent,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"failed: no end within {SECONDS} s"
    return outcome_of(ended)


def _in_its_form(word: str, text: str) -> str:
    """Return a flag as a program spells it: older ones have underscores."""
    older = f"--{word[2:].replace('-', '_')}"
    return older if word.startswith("--") and word not in text and older in text else word


def outcome_of(ended: "subprocess.CompletedProcess[str]") -> str:
    """Return the outcome of a program that has ended."""
    lines = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
    said = lines[-1].strip() if lines else "no output"
    if absent := re.search(r"No module named '([\w.]+)'", ended.stderr):
        return f"not runnable: Python lacks the module {absent[1]}"
    # Some of them print an error and end with 0.
    wrong = [
        line for line in lines if re.search(r"InferenceServerException|Received an error", line)
    ]
    if ended.returncode == 0 and not wrong:
        return "passed"
    return f"failed: {wrong[0] if wrong else said}"


if __name__ == "__main__":
    sys.exit(main())
