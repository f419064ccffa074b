r"""Step time of each model family against a Llama of the same size, in turns.

    PYTHONPATH=tests:benchmarks python benchmarks/families.py [--batches 1 8] [--steps 40] \
        [--families gemma2 phi3] [--write]

Models of about 56 million random weights in bfloat16. Families without a gate have a wider
feed-forward part, so that all have as many weights. Both engines run in this thread; every row has
an adapter of rank 8 on the projection of q, k and v. Quoted are medians of ratios of neighbouring
steps. --write: into benchmarks/results/families.md and .json.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from results_file import write_report
from safetensors.torch import save_file
from step import CONTEXT, RANK, Ledger, Subject, random_adapter

from loraplex.bench.report import markdown_table
from loraplex.core.adapter import AdapterSource, AdapterUse, LoraTarget
from loraplex.core.clock import SystemClock
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.task import Generate
from loraplex.engine.engine import build_engine
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.loading import load_runner
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.models.parameters import checkpoint_shapes
from loraplex.models.registry import read_config
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import QKV
from support.instant_loader import InstantLoader

SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
_WIDE = {"intermediate_size": 2112}
"""Size without a gate: as many weights in two matrices as others have in three."""
LLAMA = "llama"
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    LLAMA: ("LlamaConfig", {}),
    "gemma": ("GemmaConfig", {"head_dim": 64}),
    "gemma2": ("Gemma2Config", {"head_dim": 64, "sliding_window": 128}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 64, "sliding_window": 128}),
    "phi3": ("Phi3Config", {"pad_token_id": 0}),
    "granite": ("GraniteConfig", {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 128}),
    "glm4": ("Glm4Config", {"head_dim": 64, "pad_token_id": 0}),
    "cohere": ("CohereConfig", {}),
    "cohere2": ("Cohere2Config", {"sliding_window": 128}),
    "starcoder2": ("Starcoder2Config", _WIDE),
    "smollm3": ("SmolLM3Config", {"pad_token_id": 0}),
    "phi": ("PhiConfig", _WIDE),
    "gpt-neox": ("GPTNeoXConfig", _WIDE),
}


def write_family(folder: Path, name: str) -> Path:
    class_name, changes = FAMILIES[name]
    return write_model(folder, getattr(transformers, class_name)(**(SIZES | changes)))


def write_model(folder: Path, config: transformers.PretrainedConfig) -> Path:
    """Write a checkpoint of random weights in bfloat16."""
    config.dtype = "bfloat16"
    causal = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    config.architectures = [causal.__name__]
    config.save_pretrained(folder)
    tensors = {
        name: (torch.randn(shape) / 50).to(torch.bfloat16)
        for name, shape in checkpoint_shapes(read_config(folder)).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_subject(folder: Path, max_num_seqs: int, **settings: Any) -> Subject:
    host = HostAdapters()
    fixed = {"dtype": "bfloat16", "max_model_len": 2 * CONTEXT, "max_num_seqs": max_num_seqs}
    loader = InstantLoader(host, lambda source: random_adapter(source, torch.bfloat16))
    engine = build_engine(
        load_runner(folder, RunnerSettings(**(fixed | settings)), host),
        loader,
        SystemClock(),
        SchedulerSettings(enable_prefix_cache=False),
        adapter_host_bytes=4 << 30,
    )
    return Subject(engine, read_config(folder), Ledger(), torch.bfloat16.itemsize)


def targets_of(spec: ModelSpec, modules: Collection[str]) -> tuple[LoraTarget, ...]:
    """Return LoRA of these modules in all layers, and of all experts that they have."""
    return tuple(
        LoraTarget(layer, module, RANK, *shape, expert=expert)
        for layer, shapes in enumerate(spec.module_shapes)
        for module, shape in shapes.items()
        if module in modules
        for expert in range(spec.num_experts[layer].get(module, 1))
    )


def begin(
    subject: Subject, modules: Collection[str], batch: int, num_steps: int, context: int = CONTEXT
) -> None:
    """Add requests and run them until all decode. modules: those that the adapters change."""
    engine = subject.engine
    targets = targets_of(subject.config, modules)
    for index in range(batch):
        digest = f"{sorted(modules)} {index}"
        if targets:
            num_bytes = 2 * sum(target.num_elements for target in targets)
            engine.register_adapter(AdapterSource(digest, "", num_bytes, targets))
        prompt = torch.randint(subject.config.vocab_size, (context - num_steps,)).tolist()
        engine.add(
            EngineRequest(
                request_id=time.monotonic_ns(),
                prompt_token_ids=tuple(prompt),
                task=Generate(
                    SamplingParams(
                        temperature=0.0, max_tokens=num_steps + 8, ignore_eos=True, seed=0
                    )
                ),
                eos_token_ids=(),
                adapters=(AdapterUse(digest),) if targets else (),
                kv_salt=b"",
                tenant="",
                priority=0,
                arrival_ns=time.monotonic_ns(),
                deadline_ns=None,
            )
        )
    num_wanted = engine.stats().generation_tokens + 2 * batch
    while engine.stats().generation_tokens < num_wanted:
        engine.step()


def seconds_of_step(subject: Subject) -> float:
    start = time.perf_counter()
    subject.engine.step()
    return time.perf_counter() - start


def finish(subject: Subject) -> None:
    while not subject.engine.is_idle:
        subject.engine.step()


def compare(llama: Subject, other: Subject, batch: int, num_steps: int) -> dict[str, float]:
    """Return the median step times in milliseconds, and the median of the ratios."""
    for subject in (llama, other):
        groups = (layer.linears.get(QKV) for layer in subject.config.layers)
        modules = {module for group in groups if group is not None for module in group.modules}
        begin(subject, modules, batch, num_steps)
    pairs = [(seconds_of_step(llama), seconds_of_step(other)) for _ in range(num_steps)]
    for subject in (llama, other):
        finish(subject)
    return {
        "batch": batch,
        "llama_ms": 1e3 * statistics.median(first for first, _ in pairs),
        "ms": 1e3 * statistics.median(second for _, second in pairs),
        "ratio": statistics.median(second / first for first, second in pairs),
    }


def table(rows: list[dict[str, Any]]) -> str:
    head = ["family", "batch", "Llama ms", "ms", "ratio"]
    cells = [
        [
            r["family"],
            str(r["batch"]),
            f"{r['llama_ms']:.2f}",
            f"{r['ms']:.2f}",
            f"{r['ratio']:.2f}",
        ]
        for r in rows
    ]
    return markdown_table(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES)[1:])
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        max_num_seqs = max(arguments.batches)
        llama = make_subject(write_family(Path(folder) / LLAMA, LLAMA), max_num_seqs)
        for name in arguments.families:
            other = make_subject(write_family(Path(folder) / name, name), max_num_seqs)
            for batch in arguments.batches:
                rows.append({"family": name, **compare(llama, other, batch, arguments.steps)})
    print(table(rows))
    if arguments.write:
        write_report("families", "Step times of the families", rows, table(rows))


if __name__ == "__main__":
    main()
