"""The shell lines with which users convert and build, run through compat/ with other paths.

Each folder is then served, and outputs the tokens of the model that it was made from.
"""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from loraplex.app.llm import LLM
from loraplex.core.errors import LoraplexError
from loraplex.core.sampling_params import SamplingParams
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.testing.running_server import running
from support.checkpoints import save_random_model, tiny_gpt2
from support.triton_repositories import local_flags

pytestmark = pytest.mark.slow

COMPAT = Path(__file__).parents[2] / "compat"
PROMPTS = ["What is the capital of France?", "日本の首都はどこですか?", "美国的首都在哪里?"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)

TRTLLM_BACKEND = r"""
cd ${ROOT}/tensorrtllm_backend/tensorrt_llm/examples/models/core/llama
BASE_LLAMA_MODEL=${MODEL}

python3 convert_checkpoint.py --model_dir ${BASE_LLAMA_MODEL} \
                            --output_dir ./c-model/llama/fp16/1-gpu \
                            --dtype float16

trtllm-build --checkpoint_dir ./c-model/llama/fp16/1-gpu \
            --output_dir ${ENGINE} \
            --gemm_plugin float16 \
            --max_batch_size 8 \
            --max_seq_len 562 \
            --gpt_attention_plugin float16 \
            --kv_cache_type paged \
            --remove_input_padding enable \
            --use_paged_context_fmha enable \
            --lora_plugin float16 \
            --lora_target_modules attn_q attn_k attn_v \
            --max_lora_rank 8

python3 ..//hf_lora_convert.py -i ${CHINESE} -o ${OUT}/chinese-weights --storage-type float16
python3 ../hf_lora_convert.py -i ${JAPANESE} \
    -o ${OUT}/japanese-weights --storage-type float16
"""
LLGTRT = r"""
python3 ${ROOT}/opt/TensorRT-LLM-examples/llama/convert_checkpoint.py \
    --dtype bfloat16 \
    --model_dir ${MODEL} \
    --output_dir ${OUT}/model-ckpt \
    --tp_size 1

trtllm-build --checkpoint_dir ${OUT}/model-ckpt \
    --gemm_plugin bfloat16 \
    --output_dir ${ENGINE} \
    --use_paged_context_fmha enable \
    --lora_plugin bfloat16 \
    --lora_dir ${CHINESE} \
    --lora_ckpt_source hf \
    --lora_target_modules attn_q attn_k attn_v

rm -rf ${OUT}/model-ckpt
cp ${MODEL}/tokenizer.json ${ENGINE}
cp ${MODEL}/tokenizer_config.json ${ENGINE}

python3 ${ROOT}/llgtrt/scripts/extract_lora.py -i ${CHINESE} -o ${OUT}/my_finetuning.safetensors
python3 ${ROOT}/llgtrt/scripts/extract_lora.py -i ${CHINESE} \
    -o ${OUT}/my_finetuning.safetensors -t bfloat16
"""
OLDER_BACKEND = r"""
cd ${ROOT}/tensorrtllm_backend
rm -rf triton_model_repo
mkdir triton_model_repo
cp -R all_models/inflight_batcher_llm/* triton_model_repo
cd tensorrt_llm/examples/llama
python build.py --model_dir ${MODEL} \
                --dtype bfloat16 \
                --use_gpt_attention_plugin bfloat16 \
                --use_inflight_batching \
                --paged_kv_cache \
                --remove_input_padding \
                --use_gemm_plugin bfloat16 \
                --output_dir engines/bf16/1-gpu/
cd ${ROOT}/tensorrtllm_backend
cp -R tensorrt_llm/examples/llama/engines/bf16/1-gpu/ triton_model_repo/tensorrt_llm/1
python3 tools/fill_template.py \
    -i all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt "enable_trt_overlap:True"
python3 tools/fill_template.py \
    -i all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt "enable_kv_cache_reuse:True"
mv triton_model_repo/tensorrt_llm/1/1-gpu ${ENGINE}
"""
OLDER_BACKEND_LORA = r"""
cd ${ROOT}/tensorrtllm_backend
BASE_MODEL=${MODEL}

python3 tensorrt_llm/examples/llama/build.py --model_dir ${BASE_MODEL} \
                --dtype float16 \
                --remove_input_padding \
                --use_gpt_attention_plugin float16 \
                --enable_context_fmha \
                --use_gemm_plugin float16 \
                --output_dir "${ENGINE}/" \
                --max_batch_size 128 \
                --max_input_len 512 \
                --max_output_len 50 \
                --use_lora_plugin float16 \
                --lora_target_modules "attn_q" "attn_k" "attn_v" \
                --use_inflight_batching \
                --paged_kv_cache \
                --max_lora_rank 8 \
                --world_size 1 --tp_size 1

python3 tensorrt_llm/examples/hf_lora_convert.py -i ${JAPANESE} \
    -o ${OUT}/japanese-weights --storage-type float16
"""
TENSORRT_LLM = r"""
cd ${ROOT}/TensorRT-LLM
BASE_MODEL=${MODEL}

python examples/llama/convert_checkpoint.py --model_dir ${BASE_MODEL} \
    --output_dir ${OUT}/trt_ckpt/fp16/1-gpu/ \
    --dtype float16

trtllm-build --checkpoint_dir ${OUT}/trt_ckpt/fp16/1-gpu/ \
    --output_dir ${ENGINE}/ \
    --remove_input_padding enable \
    --gpt_attention_plugin float16 \
    --context_fmha enable \
    --paged_kv_cache enable \
    --gemm_plugin float16 \
    --lora_plugin float16 \
    --max_batch_size 128 \
    --max_input_len 512 \
    --max_seq_len 562 \
    --lora_dir ${JAPANESE} \
    --max_lora_rank 8 \
    --lora_target_modules "attn_q" "attn_k" "attn_v"

python3 tensorrt_llm/examples/hf_lora_convert.py -i ${JAPANESE} \
    -o ${OUT}/japanese-weights --storage-type float16
"""

OLDER_BACKEND_GPT = r"""
cd ${ROOT}/tensorrtllm_backend
rm -rf triton_model_repo
mkdir triton_model_repo
cp -R all_models/inflight_batcher_llm/* triton_model_repo
cd tensorrt_llm/examples/gpt
model_directory=${MODEL}
python3 build.py --model_dir=${model_directory} \
                 --dtype float16 \
                 --use_inflight_batching \
                 --use_gpt_attention_plugin float16 \
                 --paged_kv_cache \
                 --use_gemm_plugin float16 \
                 --remove_input_padding \
                 --use_layernorm_plugin float16 \
                 --hidden_act gelu \
                 --output_dir=engines/fp16/1-gpu
cd ${ROOT}/tensorrtllm_backend
cp -R tensorrt_llm/examples/gpt/engines/fp16/1-gpu/ triton_model_repo/tensorrt_llm/1
sed -i -e 's/${decoupled_mode}/True/' \
    -e "s|\${engine_dir}|${ROOT}/tensorrtllm_backend/triton_model_repo/tensorrt_llm/1/1-gpu/|" \
    triton_model_repo/tensorrt_llm/config.pbtxt
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of compat/, links as links: the blocks write into it."""
    copy = tmp_path_factory.mktemp("root") / "compat"
    return Path(shutil.copytree(COMPAT, copy, symlinks=True))


@pytest.fixture(scope="module")
def built(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a block to the folder with its outputs; each runs once."""

    @functools.cache
    def build(block: str) -> Path:
        out = tmp_path_factory.mktemp("built")
        replay(block, root, out)
        return out

    return build


@pytest.fixture(scope="module")
def source_tokens(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[object]]:
    """Return a function from a dtype to the tokens of the model that was built from."""
    state = tmp_path_factory.mktemp("source")
    return functools.cache(lambda dtype: tokens(BASE_PATH, state, dtype=dtype))


def replay(block: str, root: Path, out: Path, model: Path = BASE_PATH) -> None:
    """Run the block."""
    engine = out / "engine"
    paths = {
        "ROOT": root,
        "MODEL": model,
        "ENGINE": engine,
        "OUT": out,
        "CHINESE": ADAPTER_PATHS["chinese"],
        "JAPANESE": ADAPTER_PATHS["japanese"],
    }
    environment = os.environ | {name: str(path) for name, path in paths.items()}
    own_python = Path(sys.executable).parent
    environment["PATH"] = f"{root / 'bin'}:{own_python}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", block], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def tokens(model: Path, state: Path, adapter: str | None = None, **settings: str) -> list[object]:
    with LLM(model, state_dir=state, **settings) as llm:
        responses = llm.generate(PROMPTS, GREEDY, adapter=adapter)
        return [response.completions[0].token_ids for response in responses]


@pytest.mark.parametrize(
    ("block", "dtype"),
    [
        (TRTLLM_BACKEND, "float16"),
        (LLGTRT, "bfloat16"),
        (OLDER_BACKEND, "bfloat16"),
        (OLDER_BACKEND_LORA, "float16"),
        (TENSORRT_LLM, "float16"),
    ],
    ids=["tensorrtllm_backend", "llgtrt", "older", "older-lora", "tensorrt_llm"],
)
def test_what_was_built_responds_as_its_source(
    block: str,
    dtype: str,
    built: Callable[[str], Path],
    source_tokens: Callable[[str], list[object]],
    tmp_path: Path,
) -> None:
    engine = built(block) / "engine"
    assert (engine / "rank0.engine").is_file()
    assert tokens(engine, tmp_path / "state") == source_tokens(dtype)


def test_the_adapter_of_a_build_is_served(built: Callable[[str], Path], tmp_path: Path) -> None:
    out = built(TENSORRT_LLM)
    with LLM(BASE_PATH, {"japanese": ADAPTER_PATHS["japanese"]}, dtype="float16") as llm:
        expected = llm.generate(PROMPTS, GREEDY, adapter="japanese")
    found = tokens(out / "engine", tmp_path / "state", adapter="japanese")
    assert found == [response.completions[0].token_ids for response in expected]
    written = {path.name for path in (out / "japanese-weights").iterdir()}
    assert written == {"model.lora_weights.npy", "model.lora_config.npy"}


def test_limits_of_a_build_hold(built: Callable[[str], Path], tmp_path: Path) -> None:
    with LLM(built(OLDER_BACKEND_LORA) / "engine", state_dir=tmp_path / "state") as llm:
        # TensorRT-LLM's text.
        with pytest.raises(LoraplexError, match=r"Prompt length \(513\) exceeds maximum input"):
            llm.generate([[5] * 513], GREEDY)
        with pytest.raises(LoraplexError, match="at most 52"):
            llm.generate([[5] * 510], SamplingParams(max_tokens=100))
        assert llm.generate([[5] * 510], GREEDY)


def test_adapters_on_a_build_without_them(built: Callable[[str], Path], tmp_path: Path) -> None:
    with LLM(built(OLDER_BACKEND) / "engine", state_dir=tmp_path / "state") as llm:
        # TensorRT-LLM's text.
        with pytest.raises(LoraplexError, match="not enabled for this model"):
            llm.add_adapter("chinese", ADAPTER_PATHS["chinese"])
        # TensorRT-LLM's text.
        with pytest.raises(LoraplexError, match="not enabled for this model"):
            llm.generate(PROMPTS, GREEDY, lora_task_id=1)


def test_the_older_gpt_example(root: Path, tmp_path: Path) -> None:
    """Built and copied into the repository, which tritonserver's own command line then serves."""
    model = tmp_path / "gpt2"
    tokenizer = Tokenizer.from_file(str(BASE_PATH / "tokenizer.json"))
    ends = {"eos_token_id": 0, "activation_function": "gelu"}
    save_random_model(model, tiny_gpt2(tokenizer.get_vocab_size(), **ends))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_PATH / name, model)
    replay(OLDER_BACKEND_GPT, root, tmp_path, model)
    repository = root / "tensorrtllm_backend" / "triton_model_repo"
    assert (repository / "tensorrt_llm" / "1" / "1-gpu" / "rank0.engine").is_file()
    with LLM(model, state_dir=tmp_path / "state", dtype="float16") as llm:
        [expected] = llm.generate(PROMPTS[:1], GREEDY)
    text = expected.completions[0].text
    tritonserver = str(root / "bin" / "tritonserver")
    command = [sys.executable, tritonserver, f"--model-repository={repository}"]
    command += local_flags(tmp_path / "served")
    with (tmp_path / "log").open("w") as log, running(command, log) as server:
        body = {"text_input": PROMPTS[0], "max_tokens": 10, "bad_words": "", "stop_words": ""}
        status, response = server.post("/v2/models/ensemble/generate", body)
        assert status == 200, response
        assert response["text_output"] == PROMPTS[0] + text
        assert server.stop() == 0
