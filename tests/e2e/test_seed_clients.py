"""The shell blocks of the founding examples that run client programs, with the files under compat/.

But for paths and ports they are what users have in their scripts; counts are smaller. The server is
`tritonserver` of compat/bin, its repositories are the unfilled template with two values filled in,
and one for the vLLM backend.
"""

import contextlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.testing.running_server import running
from support.triton_repositories import local_flags

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("seed clients")]

COMPAT = Path(__file__).parents[2] / "compat"
TOOLS = COMPAT / "tensorrtllm_backend/tools"

CHINESE = r"美国的首都在哪里? \n答案:"
JAPANESE = r"アメリカ合衆国の首都はどこですか? \n答え:"
OUTPUTS = {"": "Washington, D.C.", "chinese": "华盛顿", "japanese": "ワシントン D.C."}


@contextlib.contextmanager
def tritonserver(folder, *flags):
    command = [sys.executable, str(COMPAT / "bin/tritonserver"), *flags]
    command += local_flags(folder / "state")
    with running(command) as server:
        yield server


def five_models(folder, decoupled):
    """The template with nothing filled in but these two, as the example has it."""
    repository = folder / "triton_model_repo"
    shutil.copytree(COMPAT / "tensorrtllm_backend/all_models/inflight_batcher_llm", repository)
    pbtxt = repository / "tensorrt_llm" / "config.pbtxt"
    text = pbtxt.read_text().replace("${decoupled_mode}", decoupled)
    pbtxt.write_text(text.replace("${engine_dir}", str(BASE_PATH)))
    return repository


@pytest.fixture(scope="module")
def unary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unary")
    with tritonserver(folder, f"--model-repository={five_models(folder, 'False')}") as server:
        yield server


@pytest.fixture(scope="module")
def decoupled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoupled")
    with tritonserver(folder, f"--model-repository={five_models(folder, 'True')}") as server:
        yield server


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The folder in which hf_lora_convert.py has left both adapters."""
    folder = tmp_path_factory.mktemp("weights")
    for name, path in ADAPTER_PATHS.items():
        block = (
            f"python3 {COMPAT}/TensorRT-LLM/examples/hf_lora_convert.py -i {path} "
            f"-o {name}-weights --storage-type float16"
        )
        shell(block, folder)
    return folder


def shell(block, folder, code=0):
    """Run it as a user would; `python3` is ours. Its standard output."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-c", block],
        cwd=folder,
        env={"PATH": path, "LANG": "C.UTF-8", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def client(server):
    script = (
        COMPAT / "tensorrtllm_backend/inflight_batcher_llm/client/inflight_batcher_llm_client.py"
    )
    return f"python3 {script} -u localhost:{server.grpc_port}"


def outputs(output):
    """Return the (prompt, output) pairs that several clients printed in any order, sorted."""
    pattern = r"^Input: (.*)\nOutput beam 0: (.*)\nOutput sequence:  \[\d"
    return sorted(re.findall(pattern, output, re.MULTILINE))


def six():
    """Outputs that the founding example shows."""
    return sorted((text, OUTPUTS[name]) for text in (CHINESE, JAPANESE) for name in OUTPUTS)


@pytest.mark.parametrize("mode", ["unary", "decoupled"])
def test_six_clients_with_weights(request, weights, mode):
    server = request.getfixturevalue(mode)
    output = shell(
        f"""
        INPUT_TEXT=("{CHINESE}" "{CHINESE}" "{CHINESE}" "{JAPANESE}" "{JAPANESE}" "{JAPANESE}")
        LORA_PATHS=("" "chinese-weights" "japanese-weights" "" "chinese-weights" "japanese-weights")

        for index in ${{!INPUT_TEXT[@]}}; do
            text=${{INPUT_TEXT[$index]}}
            lora_path=${{LORA_PATHS[$index]}}
            lora_arg=""
            if [ "${{lora_path}}" != "" ]; then
                lora_arg="--lora-path ${{lora_path}}"
            fi

            {client(server)} \
                --top-k 0 \
                --top-p 0.5 \
                --request-output-len 10 \
                --text "${{text}}" \
                --tokenizer-dir {BASE_PATH} \
                ${{lora_arg}} &
        done

        wait
        """,
        weights,
    )
    assert outputs(output) == six()
    assert output.count("Got completed request\n") == 6
    assert len(re.findall(r"^Input sequence:  \[1, ", output, re.MULTILINE)) == 6


def test_six_clients_with_task_ids(unary, weights):
    output = shell(
        f"""
        TASK_IDS=("1" "2")
        LORA_PATHS=("chinese-weights" "japanese-weights")

        for index in ${{!TASK_IDS[@]}}; do
            text="dummy"
            lora_path=${{LORA_PATHS[$index]}}
            task_id=${{TASK_IDS[$index]}}
            lora_arg="--lora-path ${{lora_path}} --lora-task-id ${{task_id}}"

            {client(unary)} --top-k 0 --top-p 0.5 --request-output-len 10 --text "${{text}}" \
                --tokenizer-dir {BASE_PATH} ${{lora_arg}} > /dev/null &
        done
        wait

        INPUT_TEXT=("{CHINESE}" "{CHINESE}" "{CHINESE}" "{JAPANESE}" "{JAPANESE}" "{JAPANESE}")
        TASK_IDS=("" "1" "2" "" "1" "2")

        for index in ${{!INPUT_TEXT[@]}}; do
            text=${{INPUT_TEXT[$index]}}
            task_id=${{TASK_IDS[$index]}}
            lora_arg=""
            if [ "${{task_id}}" != "" ]; then
                lora_arg="--lora-task-id ${{task_id}}"
            fi

            {client(unary)} --top-k 0 --top-p 0.5 --request-output-len 10 --text "${{text}}" \
                --tokenizer-dir {BASE_PATH} ${{lora_arg}} &
        done
        wait
        """,
        weights,
    )
    assert outputs(output) == six()


@pytest.mark.parametrize("mode", ["unary", "decoupled"])
@pytest.mark.parametrize("flags", ["", "--stop-via-request-cancel"])
def test_stop_after(request, tmp_path, mode, flags):
    """Return token ids without an end token, as this model's own outputs are short."""
    server = request.getfixturevalue(mode)
    (tmp_path / "ids.csv").write_text("1,653,298,472,368")
    block = (
        f"{client(server)} --stop-after-ms 200 --request-output-len 2000 "
        f"--input-tokens-csv ids.csv --end-id -1 {flags}"
    )
    if mode == "decoupled":
        block += " --streaming"
    output = shell(block, tmp_path)
    if flags:
        assert "Request is cancelled" in output
    else:
        assert "Got cancellation response from server" in output
        (sequence,) = re.findall(r"^Output sequence:  (.*)$", output, re.MULTILINE)
        assert 5 < len(json.loads(sequence)) < 2005


def test_a_client_without_any_flag_but_the_length(unary, tmp_path):
    """Follow seeds/002: the server tokenizes, and a short output ends before its stop."""
    output = shell(f"{client(unary)} --request-output-len 20", tmp_path)
    assert "Input: Born in north-east France, Soyer trained as a\nOutput beam 0: " in output
    block = f"{client(unary)} --stop-after-ms 200 --request-output-len 200 --text '{CHINESE}'"
    assert outputs(shell(block, tmp_path)) == [(CHINESE, OUTPUTS[""])]


def test_end_to_end(unary, tmp_path):
    block = f"""
        cd {TOOLS}/inflight_batcher_llm
        python3 end_to_end_test.py --dataset ../dataset/capitals.json -u localhost:{unary.http_port}
        """
    lines = shell(block, tmp_path).splitlines()
    assert lines[1:4] == [
        "[INFO] Functionality test succeed.",
        "[INFO] Warm up for benchmarking.",
        "[INFO] Start benchmarking on 12 prompts.",
    ]
    assert re.fullmatch(r"\[INFO\] Total Latency: [\d.]+ ms", lines[4])


def test_end_to_end_decoupled(decoupled, tmp_path):
    block = f"""
        cd {TOOLS}/inflight_batcher_llm
        python3 end_to_end_test.py -i grpc --dataset ../dataset/capitals.json --test-bls \
            --streaming --return-log-probs -u localhost:{decoupled.grpc_port}
        """
    assert "[INFO] Functionality test succeed." in shell(block, tmp_path)


@pytest.mark.parametrize("mode", ["unary", "decoupled"])
@pytest.mark.parametrize(
    ("workload", "num_prompts"),
    [
        (
            "dataset --dataset ../dataset/capitals.json --tokenizer_dir {base} "
            "--tokenizer_type llama --num_requests 5000",
            12,
        ),
        (
            "token_norm_dist --input_mean 128 --input_stdev 5 --output_mean 20 --output_stdev 2 "
            "--num_requests 40",
            40,
        ),
    ],
)
def test_core_benchmark(request, tmp_path, mode, workload, num_prompts):
    server = request.getfixturevalue(mode)
    block = f"""
        cd {TOOLS}/inflight_batcher_llm
        python3 benchmark_core_model.py -i grpc --request_rate 40 \
            {workload.format(base=BASE_PATH)} -u localhost:{server.grpc_port}
        """
    lines = shell(block, tmp_path).splitlines()
    assert "[INFO] Warm up for benchmarking." in lines
    assert f"[INFO] Start benchmarking on {num_prompts} prompts." in lines
    rows = [line.split("|")[1:3] for line in lines if line.startswith("|")]
    values = {name.strip(): value.strip() for name, value in rows}
    assert list(values) == [
        "Stat",
        "Requests/Sec",
        "OP tokens/sec",
        "Avg. latency (ms)",
        "P99 latency (ms)",
        "P90 latency (ms)",
        "Avg. IP tokens per request",
        "Avg. OP tokens per request",
        "Total latency (ms)",
        "Total requests",
    ]
    assert values["Total requests"] == f"{num_prompts}.00"
    assert float(values["Avg. OP tokens per request"]) > 1


def test_identity_test_is_the_same_program(unary, tmp_path):
    block = (
        f"python3 {TOOLS}/inflight_batcher_llm/identity_test.py -i grpc "
        f"-u localhost:{unary.grpc_port} token-from-histogram --histogram-key example "
        "--num-requests 5"
    )
    assert "|       Total requests       |" in shell(block, tmp_path)


def test_end_to_end_grpc_client(decoupled, weights):
    script = COMPAT / "tensorrtllm_backend/inflight_batcher_llm/client/end_to_end_grpc_client.py"
    call = f"python3 {script} -u localhost:{decoupled.grpc_port} --exclude-input-in-output"
    assert shell(f"{call} -p '{CHINESE}' -o 10", weights) == "0: Washington, D.C.\n"
    output = shell(
        f"{call} --prompt '{CHINESE}' -S --lora-path chinese-weights --lora-task-id 5", weights
    )
    assert output == "0: 华盛顿\n"


def test_client_lora(tmp_path):
    version = tmp_path / "model_repository/vllm_model/1"
    version.mkdir(parents=True)
    samples = COMPAT / "vllm_backend/samples"
    shutil.copy(samples / "model_repository/vllm_model/config.pbtxt", version.parent)
    model = {"model": str(BASE_PATH), "disable_log_requests": "true", "enable_lora": "true"}
    model |= {"gpu_memory_utilization": 0.8, "block_size": 16, "enforce_eager": "true"}
    (version / "model.json").write_text(json.dumps(model | {"max_lora_rank": 16}))
    (version / "multi_lora.json").write_text(
        json.dumps({k: str(v) for k, v in ADAPTER_PATHS.items()})
    )
    shutil.copy(samples / "prompts.txt", tmp_path)
    with tritonserver(tmp_path, "--model-store", str(tmp_path / "model_repository")) as server:
        call = f"python3 {samples}/client_lora.py -u localhost:{server.grpc_port}"
        output = shell(f"{call} -l chinese", tmp_path)
        assert output.startswith("Loading inputs from `prompts.txt`...\n")
        assert output.endswith("Storing results into `results.txt`...\nPASS: vLLM example\n")
        results = (tmp_path / "results.txt").read_text()
        assert results.count("\n\n=========\n\n") == 4
        assert "The capital of France is\n" in results
        assert "FAIL: vLLM example" in shell(f"{call} -l nobody", tmp_path, code=1)
        shell(f"python3 {samples}/client.py -u localhost:{server.grpc_port} -s", tmp_path)
