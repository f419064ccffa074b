"""Eight translations with eight adapters in one batch, and one after another in transformers.

    PYTHONPATH=tests python benchmarks/translations.py [--width 512] [--layers 6] [--tokens 48]
        [--repeats 3]

A random T5 of the given size, with adapters of rank 8 on q and v of both stacks. transformers with
PEFT switches the adapter for each text, as one batch of it has one adapter. Both use float32 and
the same number of threads, in turns; both must give the same tokens.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import T5Config, T5ForConditionalGeneration

from loraplex import LLM, SamplingParams
from support.encoder_decoders import VOCAB_SIZE, random_inputs, write_tokenizer

NUM_ADAPTERS = 8
INPUTS = random_inputs((24, 40, 31, 18, 52, 27, 36, 45))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = saved_model(folder, options.width, options.layers)
        sampling = SamplingParams(max_tokens=options.tokens, temperature=0.0, ignore_eos=True)
        adapters = {f"a{index}": folder / f"a{index}" for index in range(NUM_ADAPTERS)}
        with LLM(
            folder,
            adapters,
            state_dir=folder / "state",
            dtype="float32",
            num_threads=options.threads,
            max_num_seqs=NUM_ADAPTERS,
            max_model_len=256,
            kv_cache_bytes=1 << 28,
            max_lora_rank=8,
        ) as llm:
            times: dict[str, list[float]] = {"loraplex": [], "transformers + PEFT": []}
            for repeat in range(options.repeats + 1):
                started = time.perf_counter()
                outputs = llm.generate(INPUTS, sampling, adapter=list(adapters))
                middle = time.perf_counter()
                expected = [
                    translated(model, name, given, options.tokens)
                    for name, given in zip(adapters, INPUTS, strict=True)
                ]
                ended = time.perf_counter()
                assert [list(each.token_ids) for each in outputs] == expected
                if repeat:  # the first is not counted
                    times["loraplex"].append(middle - started)
                    times["transformers + PEFT"].append(ended - middle)
        medians = {name: statistics.median(each) for name, each in times.items()}
        for name, each in times.items():
            shown = ", ".join(f"{seconds:.2f}" for seconds in each)
            print(f"{name}: {medians[name]:.2f} s ({shown})")
        print(f"{medians['transformers + PEFT'] / medians['loraplex']:.1f} times as fast")


def saved_model(folder: Path, width: int, layers: int) -> PeftModel:
    torch.default_generator.manual_seed(0)
    config = T5Config(
        vocab_size=VOCAB_SIZE,
        d_model=width,
        d_kv=64,
        d_ff=2 * width,
        num_layers=layers,
        num_heads=width // 64,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    base = T5ForConditionalGeneration(config).float().eval()
    base.save_pretrained(folder)
    write_tokenizer(folder)
    model: Any = None
    for index in range(NUM_ADAPTERS):
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM")
        if model is None:
            model = get_peft_model(base, lora, adapter_name="a0")
        else:
            model.add_adapter(f"a{index}", lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(str(folder / "saved"))
    for index in range(NUM_ADAPTERS):
        (folder / "saved" / f"a{index}").rename(folder / f"a{index}")
    return model.eval()


def translated(model: Any, adapter: str, given: list[int], num_tokens: int) -> list[int]:
    model.set_adapter(adapter)
    with torch.inference_mode():
        output = model.generate(
            input_ids=torch.tensor([given]),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
        )
    tokens: list[int] = output[0].tolist()[1:]
    return tokens


if __name__ == "__main__":
    main()
