"""Vectors of 64 texts with 16 adapters: one batch here, adapters by turns in sentence-transformers.

    python benchmarks/vectors.py [--model tiny] [--dtype bfloat16] [--rounds 5] [--threads 2]

Both compute the last token's vector with the same model of random weights (comparison.shapes) and
the same adapters of rank 8, in turns. sentence-transformers has one adapter at a time: it encodes
the texts of one adapter in a batch, then those of the next. Vectors must agree. Then 16 texts are
written alone, and again while vectors of 16 of the texts are requested without a pause: the
99th percentile of the time between two tokens.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comparison.fixtures import RANK_8, Fixture
from comparison.shapes import find_shape
from safetensors.numpy import load_file, save_file

from loraplex import AsyncLLM, SamplingParams
from loraplex.core.environment import cache_directory

NUM_ADAPTERS, NUM_TEXTS, NUM_TOKENS = 16, 64, 128
NUM_STREAMS, NUM_OUTPUT_TOKENS = 16, 96
NARROW_AGREEMENT, AGREEMENT = 0.99, 1 - 1e-6
"""Least cosine of two vectors, in bfloat16 and in float32."""


def write_feature_adapter(source: Path, folder: Path) -> None:
    """Name the tensors of an adapter as PEFT does for a model without an output layer."""
    folder.mkdir(parents=True)
    config = json.loads((source / "adapter_config.json").read_text())
    config["task_type"] = "FEATURE_EXTRACTION"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(source / "adapter_model.safetensors")
    renamed = {name.replace(".model.model.", ".model.", 1): each for name, each in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")


def feature_adapters(fixture: Fixture) -> dict[str, Path]:
    found = {}
    for adapter in fixture.adapters(RANK_8, NUM_ADAPTERS):
        found[adapter.name] = fixture.converted / "features" / adapter.name
        if not found[adapter.name].exists():
            write_feature_adapter(adapter.path, found[adapter.name])
    return found


def sentence_transformer(model: Path, adapters: dict[str, Path], dtype: str) -> Any:
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 (takes seconds)
    from sentence_transformers.base.modules import Normalize, Transformer  # noqa: PLC0415
    from sentence_transformers.sentence_transformer.modules import Pooling  # noqa: PLC0415

    transformer = Transformer(str(model), model_kwargs={"dtype": getattr(torch, dtype)})
    width = json.loads((model / "config.json").read_text())["hidden_size"]
    modules = [transformer, Pooling(width, pooling_mode="lasttoken"), Normalize()]
    found = SentenceTransformer(modules=modules, device="cpu")
    found.tokenizer.pad_token = found.tokenizer.eos_token
    for name, folder in adapters.items():
        found.load_adapter(str(folder), adapter_name=name)
    return found


def encoded_by_turns(model: Any, adapters: Sequence[str], texts: Sequence[str]) -> Any:
    """Vectors [texts, width]: text i has adapter i modulo their number."""
    found: Any = [None] * len(texts)
    for number, name in enumerate(adapters):
        model.set_adapter(name)
        own = range(number, len(texts), len(adapters))
        vectors = model.encode([texts[index] for index in own], convert_to_tensor=True)
        for index, vector in zip(own, vectors.float().numpy(), strict=True):
            found[index] = vector
    return np.stack(found)


async def compare(options: argparse.Namespace) -> None:
    fixture = Fixture(find_shape(options.model), options.fixtures)
    fixture.ensure_model()
    adapters = feature_adapters(fixture)
    draws = np.random.default_rng(0)
    words = np.array(fixture.tokens)[fixture.vocabulary.start :]
    texts = ["".join(draws.choice(words, NUM_TOKENS)) for _ in range(NUM_TEXTS)]
    names = list(adapters)
    choices = [names[index % NUM_ADAPTERS] for index in range(NUM_TEXTS)]
    peer = sentence_transformer(fixture.model, adapters, options.dtype)
    llm = AsyncLLM(
        fixture.model,
        adapters,
        dtype=options.dtype,
        num_threads=options.threads,
        max_model_len=1024,
        max_num_seqs=NUM_TEXTS + NUM_STREAMS,
        kv_cache_bytes=1 << 30,
        enable_prefix_cache=False,
        max_lora_rank=8,
    )
    async with llm:
        ratios, times, num_tokens = [], [], 0
        for number in range(options.rounds + 1):
            started = time.perf_counter()
            ours = await llm.embed(texts, adapter=choices)
            middle = time.perf_counter()
            theirs = encoded_by_turns(peer, names, texts)
            ended = time.perf_counter()
            cosines = [float(a.vector @ b) for a, b in zip(ours, theirs, strict=True)]
            least = AGREEMENT if options.dtype == "float32" else NARROW_AGREEMENT
            if min(cosines) < least:
                raise SystemExit(f"the vectors differ: a cosine of {min(cosines)}")
            num_tokens = sum(len(each.prompt_token_ids) for each in ours)
            if number:  # the first is not counted
                times.append((middle - started, ended - middle))
                ratios.append(times[-1][1] / times[-1][0])
        for index, name in enumerate(("loraplex", "sentence-transformers")):
            median = statistics.median(pair[index] for pair in times)
            print(f"{name}: {num_tokens / median:.0f} tokens a second")
        least, most = min(ratios), max(ratios)
        print(f"{statistics.median(ratios):.1f} times as fast ({least:.1f} to {most:.1f})")
        alone = await between_tokens(llm, words, draws, lambda: asyncio.sleep(0.01))
        shared = await between_tokens(
            llm, words, draws, lambda: llm.embed(texts[:NUM_ADAPTERS], adapter=names)
        )
        print(f"99 % of tokens within {alone:.1f} ms alone, {shared:.1f} ms with vectors")


async def between_tokens(
    llm: AsyncLLM, words: Any, draws: np.random.Generator, work: Callable[[], Any]
) -> float:
    """Milliseconds between tokens of 16 streams, the 99th percentile, while `work` is repeated."""
    gaps: list[float] = []
    sampling = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)

    async def read(prompt: str) -> None:
        last = None
        async for _ in llm.stream(prompt, sampling):
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last = now

    async def repeat() -> None:
        while True:
            await work()

    repeated = asyncio.create_task(repeat())
    prompts = ["".join(draws.choice(words, 16)) for _ in range(NUM_STREAMS)]
    await asyncio.gather(*map(read, prompts))
    repeated.cancel()
    await asyncio.wait([repeated])
    return 1e3 * float(np.percentile(gaps, 99))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--fixtures", type=Path, default=cache_directory() / "bench")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    asyncio.run(compare(options))


if __name__ == "__main__":
    main()
