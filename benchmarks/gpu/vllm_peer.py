"""Part f: the same requests by vLLM and by loraplex, in one run.

vLLM is used if the machine has it, or if its wheel and those of what it needs are in .gpu/wheels
(docs/gpu.md). Both serve random weights of one shape, and distinct adapters.
"""

import functools
import importlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from gpu.card import seconds_of
from gpu.journal import CellJournal, Figures
from gpu.models import MODULES, decoder_config, hf_config
from gpu.reference import Plan, figures_of, names, our_keys, release, requests_of, run_ours
from gpu.rig import lora_targets, start_seconds
from gpu.unpack import WHEELS
from loraplex.bench.report import markdown_table
from loraplex.bench.workload import PlannedRequest

_REPEATS = 3
_PEER_SECONDS = 150.0
"""Start of vLLM, which compiles its own graphs."""
_MEMORY_SHARE = 0.85

FULL = Plan("llama-3.1-8b", "bfloat16", ((16, "qkv"), (16, "all")), 32, 128, 64, 0)
TINY = Plan("tiny", "float32", ((4, "qkv"),), 3, 8, 4, 0)


class Peer(Protocol):
    """A server of one model in this process."""

    def generate(self, requests: Sequence[PlannedRequest], adapters: Sequence[Path]) -> None:
        """Serve all requests together; the adapter of a request is an index of `adapters`."""
        ...

    def close(self) -> None: ...


class PeerMissing(Exception):
    """It cannot be used here; the message has the reason."""


OpenPeer = Callable[[Path, Plan], Peer]


def run(
    journal: CellJournal,
    device: torch.device,
    plan: Plan,
    open_peer: "OpenPeer | None" = None,
) -> None:
    """open_peer: takes the folder of a model, whose weights are random. None: vLLM."""
    if journal.begins(our_keys(plan), start_seconds(device)):
        run_ours(journal, device, plan)
    release(device)
    if not journal.begins(_their_keys(plan), _PEER_SECONDS if device.type == "cuda" else 0.0):
        return
    with tempfile.TemporaryDirectory() as folder:
        _save_model(Path(folder), plan)
        try:
            peer = (open_peer or open_vllm)(Path(folder), plan)
        except PeerMissing as error:
            journal.leave_out(_their_keys(plan), str(error))
            return
        try:
            for name, kind in zip(names(plan), (None, *plan.kinds), strict=True):
                adapters = [] if kind is None else _save_adapters(Path(folder), plan, *kind)
                work = functools.partial(_served, peer, device, plan, adapters)
                journal.measure(f"vllm {name}", work, seconds=45)
        finally:
            peer.close()


def keys(plan: Plan) -> list[str]:
    return our_keys(plan) + _their_keys(plan)


def _their_keys(plan: Plan) -> list[str]:
    return [f"vllm {name}" for name in names(plan)]


def _served(peer: Peer, device: torch.device, plan: Plan, adapters: list[Path]) -> Figures:
    vocab = decoder_config(plan.model, plan.dtype).vocab_size
    repeat = iter(range(1 + _REPEATS))

    def work() -> None:
        peer.generate(requests_of(plan, next(repeat), vocab, bool(adapters)), adapters)

    return figures_of(plan, seconds_of(work, device, _REPEATS), plan.batch)


def _save_model(folder: Path, plan: Plan) -> None:
    (folder / "config.json").write_text(json.dumps(hf_config(plan.model, plan.dtype)))


def _save_adapters(folder: Path, plan: Plan, rank: int, modules: str) -> list[Path]:
    """Return folders of peft's, which share one file of weights."""
    config, dtype = decoder_config(plan.model, plan.dtype), getattr(torch, plan.dtype)
    weights = folder / f"r{rank} {modules}.safetensors"
    tensors = {}
    for target in lora_targets(config, rank, modules):
        part = "self_attn" if target.module in MODULES["qkvo"] else "mlp"
        name = f"base_model.model.model.layers.{target.layer}.{part}.{target.module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, target.in_features).to(dtype) / 100
        tensors[f"{name}.lora_B.weight"] = torch.randn(target.out_features, rank).to(dtype) / 100
    save_file(tensors, weights)
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    described |= {"task_type": "CAUSAL_LM", "target_modules": list(MODULES[modules])}
    folders = [folder / f"r{rank}-{modules}-{number}" for number in range(plan.batch)]
    for each in folders:
        each.mkdir()
        (each / "adapter_config.json").write_text(json.dumps(described))
        os.link(weights, each / "adapter_model.safetensors")
    return folders


def open_vllm(folder: Path, plan: Plan) -> Peer:
    """Start vLLM with random weights. Raises PeerMissing."""
    try:
        vllm: Any = importlib.import_module("vllm")
        lora: Any = importlib.import_module("vllm.lora.request")
    except ImportError as error:
        raise PeerMissing(_what_is_missing(error, WHEELS)) from error
    try:
        return _Vllm(vllm, lora.LoRARequest, folder, plan)
    except Exception as error:
        raise PeerMissing(f"vllm does not start: {type(error).__name__}: {error}"[:500]) from error


def _what_is_missing(error: ImportError, wheels: Path) -> str:
    """Return why vLLM cannot be imported."""
    if error.name != "vllm":
        return f"vllm needs {error.name or error}, which is not here: carry its wheel in {wheels}"
    found = ", ".join(path.name for path in wheels.glob("vllm-*.whl"))
    if found:
        return f"{found} in {wheels} does not bring vllm to this Python"
    return f"vllm is not installed, and there is no wheel of it in {wheels}"


class _Vllm:
    """Implements Peer."""

    def __init__(self, vllm: Any, lora_request: Any, folder: Path, plan: Plan) -> None:
        self._vllm = vllm
        self._lora_request = lora_request
        self._ids: dict[Path, int] = {}
        self._sampling = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=plan.output_tokens,
            min_tokens=plan.output_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        self._llm = vllm.LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=plan.dtype,
            max_model_len=plan.prompt_tokens + plan.output_tokens + 16,
            max_num_seqs=plan.batch,
            gpu_memory_utilization=_MEMORY_SHARE,
            enable_prefix_caching=False,
            enable_lora=True,
            max_loras=plan.batch,
            max_lora_rank=max(16, *(rank for rank, _ in plan.kinds)),
        )

    def generate(self, requests: Sequence[PlannedRequest], adapters: Sequence[Path]) -> None:
        prompts = [{"prompt_token_ids": list(each.prompt_token_ids)} for each in requests]
        used = None
        if adapters:
            used = [self._request(adapters[each.adapter or 0]) for each in requests]
        self._llm.generate(prompts, self._sampling, lora_request=used, use_tqdm=False)

    def _request(self, adapter: Path) -> Any:
        number = self._ids.setdefault(adapter, len(self._ids) + 1)
        return self._lora_request(adapter.name, number, str(adapter))

    def close(self) -> None:
        del self._llm


def table(journal: CellJournal, plan: Plan) -> str:
    rows = []
    for name in names(plan):
        cells = [journal.cells.get(f"{server} {name}") for server in ("loraplex", "vllm")]
        ours, theirs = (cell.figures.get("tokens_per_second") if cell else None for cell in cells)
        ratio = f"{ours / theirs:.2f}" if ours and theirs else ""
        speeds = ("" if speed is None else f"{speed:.0f}" for speed in (ours, theirs))
        rows.append((name, *speeds, ratio))
    return markdown_table(("adapters", "loraplex tok/s", "vLLM tok/s", "to vLLM"), rows)
