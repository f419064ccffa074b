"""The server and the converters are fakes; that the real ones agree is the comparison's check."""

import os
from pathlib import Path

import msgspec
import pytest
from comparison.loraplex_system import LoraplexServer
from comparison.peers.llama_cpp import LlamaCpp

from loraplex.core.errors import ConfigError, UnsupportedFeatureError
from support.naming import naming

CONVERT = """
import pathlib, sys
target = pathlib.Path(sys.argv[sys.argv.index("--outfile") + 1])
target.write_text(" ".join(sys.argv[1:]))
with (pathlib.Path(__file__).parent / "runs").open("a") as runs:
    runs.write(sys.argv[sys.argv.index("--outtype") + 1] + "\\n")
"""
NOT_THE_USERS = ("LORAPLEX_", "PYTEST_CURRENT_TEST")
STREAM = (
    'data: {"content": "x", "tokens": [5], "stop": false}',
    'data: {"content": "", "tokens": [], "stop": false}',
    'data: {"content": "yz", "tokens": [6, 7], "stop": false}',
    'data: {"content": "", "tokens": [], "stop": true, "tokens_evaluated": 2, '
    '"tokens_predicted": 3, "timings": {"cache_n": 1}}',
)


@pytest.fixture
def folder(executable, fake_server, tmp_path):
    folder = tmp_path / "llama.cpp"
    executable(folder / "build" / "bin" / "llama-server", fake_server.program())
    for script in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py"):
        executable(folder / script, CONVERT)
    fake_server.responds_with(*STREAM)
    return folder


QUANTIZES = """
import pathlib, sys
source, target, kind = sys.argv[1:]
pathlib.Path(target).write_text(pathlib.Path(source).name + " " + kind)
"""


@pytest.fixture
async def running(folder, setup):
    running = await LlamaCpp(folder, "16-bit").start(setup)
    yield running
    await running.stop()


async def test_an_output_is_read_from_its_stream(running, exchange):
    sent = exchange()
    await running.send(sent)
    received = running.read(sent)
    assert received.text == "<5><6><7>"
    assert len(received.chunk_ns) == 2
    assert (received.num_prompt_tokens, received.num_output_tokens) == (2, 3)
    assert received.num_cached_tokens == 1
    assert received.error is None


async def test_the_base_is_requested_by_a_scale_of_zero(running, exchange, fake_server):
    for adapter in (None, 0, 1):
        await running.send(exchange(adapter))
    bodies = [body for _, body in fake_server.requests()]
    assert [body["lora"] for body in bodies] == [
        [{"id": 0, "scale": 0.0}],
        [{"id": 0, "scale": 1.0}],
        [{"id": 1, "scale": 1.0}],
    ]
    assert all(body["cache_prompt"] is False and body["ignore_eos"] is True for body in bodies)
    assert bodies[0]["prompt"] == [10, 11]
    assert bodies[0]["n_predict"] == 3


async def test_without_adapters_no_lora_is_requested(folder, setup, exchange, fake_server):
    running = await LlamaCpp(folder, "8-bit").start(msgspec.structs.replace(setup, adapters=()))
    try:
        await running.send(exchange())
    finally:
        await running.stop()
    ((_, body),) = fake_server.requests()
    assert "lora" not in body
    assert "--lora" not in fake_server.command()


async def test_every_request_has_a_connection_of_its_own(running, exchange, fake_server):
    await running.send(exchange())
    assert fake_server.request_connections() == ["close"]


async def test_the_server_has_a_slot_for_each_sequence_at_full_length(running, fake_server):
    assert fake_server.flag("--parallel") == "4"
    assert fake_server.flag("--ctx-size") == str(4 * 64)
    assert fake_server.flag("--threads") == fake_server.flag("--threads-batch") == "1"
    assert "--lora-init-without-apply" in fake_server.command()
    assert [Path(file).name for file in fake_server.flag("--lora").split(",")] == [
        "0.gguf",
        "1.gguf",
    ]


async def test_files_are_converted_once_for_each_width(folder, setup):
    for weights in ("16-bit", "16-bit", "8-bit", "32-bit"):
        running = await LlamaCpp(folder, weights).start(setup)
        await running.stop()
    # The model, then the two adapters; Q8_0 keeps those of F16.
    assert (folder / "runs").read_text().split() == ["f16"] * 3 + ["q8_0"] + ["f32"] * 3


async def test_an_adapter_keeps_its_place_whatever_the_set(folder, setup, fake_server):
    fewer = msgspec.structs.replace(setup, adapters=setup.adapters[1:])
    for one in (setup, fewer):
        running = await LlamaCpp(folder, "16-bit").start(one)
        await running.stop()
    converted = fake_server.flag("--lora")
    with open(converted) as file:
        assert file.read().endswith(str(setup.adapters[1].path))


async def test_a_refusal_and_a_broken_stream_are_errors(running, exchange, fake_server):
    refused, broken, odd = exchange(prompt=(99,)), exchange(), exchange()
    await running.send(refused)
    assert running.read(refused).error == "status 400: no such token"
    fake_server.responds_with('data: {"error": {"message": "slot lost"}}')
    await running.send(broken)
    assert "slot lost" in running.read(broken).error
    fake_server.responds_with("data: nonsense")
    await running.send(odd)
    assert "is not a chunk" in running.read(odd).error


async def test_adapters_are_those_of_the_start(running, new_adapter):
    with pytest.raises(UnsupportedFeatureError, match=naming("late", "llama.cpp")):
        await running.add_adapter(new_adapter("late"))
    with pytest.raises(UnsupportedFeatureError):
        await running.remove_adapter(0)


async def test_stop_leaves_no_process(folder, setup):
    running = await LlamaCpp(folder, "16-bit").start(setup)
    (pid,) = running.process_ids
    await running.stop()
    await running.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_version_is_what_the_server_says(folder, executable):
    prints = "import sys\nsys.stderr.write('warning\\nversion: 1 (abc)\\nbuilt\\n')"
    executable(folder / "build" / "bin" / "llama-server", prints)
    assert LlamaCpp(folder, "16-bit").version() == "version: 1 (abc)"
    executable(folder / "build" / "bin" / "llama-server", "raise SystemExit(1)")
    assert LlamaCpp(folder, "16-bit").version() == ""


def test_what_a_folder_lacks_is_reported(folder, tmp_path):
    with pytest.raises(ConfigError, match=naming("build/bin/llama-server", "bin/llama-server")):
        LlamaCpp(tmp_path, "16-bit")
    (folder / "convert_lora_to_gguf.py").unlink()
    with pytest.raises(ConfigError, match=naming("convert_lora_to_gguf.py", "llama.cpp")):
        LlamaCpp(folder, "16-bit")
    with pytest.raises(ConfigError, match=naming("8-bit", "gguf:BF16", "gguf:TYPE", "4-bit")):
        LlamaCpp(folder, "4-bit")


async def test_a_gguf_file_is_quantized_once_from_16_bits(folder, executable, setup, fake_server):
    quantized = LlamaCpp(folder, "gguf:Q4_K_M")
    assert (quantized.name, quantized.weight_bits) == ("llama.cpp gguf:Q4_K_M", 4)
    with pytest.raises(ConfigError, match=naming("build/bin/llama-quantize", "llama.cpp")):
        await quantized.model_file(setup)
    executable(folder / "build" / "bin" / "llama-quantize", QUANTIZES)
    file = await quantized.model_file(setup)
    assert file.read_text() == "model-F16.gguf Q4_K_M"
    for _ in range(2):
        running = await quantized.start(setup)
        await running.stop()
        assert fake_server.flag("--model") == str(file)
    assert (folder / "runs").read_text().split() == ["f16"] * 3
    # Ours serves that very file.
    assert await LoraplexServer.with_weights(quantized.weights, [quantized]).file(setup) == file


async def test_a_file_that_the_fixture_writes_is_not_converted(folder, setup, fake_server):
    """Ours serves that very file, too, and needs no llama.cpp for it."""
    taken = []

    def gguf_file(gguf_type):
        taken.append(gguf_type)
        return setup.cache / f"{gguf_type}.gguf"

    setup = msgspec.structs.replace(setup, gguf_file=gguf_file)
    for weights, gguf_type in (("gguf:Q4_K_M", "Q4_K_M"), ("8-bit", "Q8_0"), ("16-bit", "F16")):
        running = await LlamaCpp(folder, weights).start(setup)
        await running.stop()
        assert fake_server.flag("--model") == str(setup.cache / f"{gguf_type}.gguf")
    assert taken == ["Q4_K_M", "Q8_0", "F16"]
    assert (folder / "runs").read_text().split() == ["f16"] * 2  # the adapters
    ours = LoraplexServer.with_weights("gguf:Q4_K_M", [], has_gguf_files=True)
    assert (ours.name, ours.weight_bits) == ("loraplex gguf:Q4_K_M", 4)
    assert await ours.file(setup) == setup.cache / "Q4_K_M.gguf"
    with pytest.raises(ConfigError, match=naming("Q2_K", "Q4_K_M")):
        LoraplexServer.with_weights("gguf:Q2_K", [], has_gguf_files=True)


async def test_a_gguf_file_in_bfloat16_is_converted_without_quantization(folder, setup):
    converted = LlamaCpp(folder, "gguf:BF16")
    assert (converted.name, converted.weight_bits) == ("llama.cpp gguf:BF16", 16)
    file = await converted.model_file(setup)
    assert file.name == "model-BF16.gguf"
    assert (folder / "runs").read_text().split() == ["bf16"]
    ours = LoraplexServer.with_weights(converted.weights, [converted])
    assert (ours.weight_bits, await ours.file(setup)) == (16, file)


async def test_the_documented_settings_of_threads(folder, executable, setup, fake_server):
    setup = msgspec.structs.replace(setup, num_threads=4)
    variants = LlamaCpp(folder, "16-bit").variants
    flags = {}
    place = folder / "build-no-openmp" / "bin" / "llama-server"
    for name, variant in variants.items():
        assert variant.name == "llama.cpp F16"
        if "OpenMP off" in name:
            with pytest.raises(
                ConfigError, match=naming("build-no-openmp/bin/llama-server", "llama.cpp")
            ):
                await variant.start(setup)
            executable(place, fake_server.program())
        running = await variant.start(setup)
        await running.stop()
        assert running.launch.command[0] == str(
            place if "OpenMP off" in name else folder / "build" / "bin" / "llama-server"
        )
        place.unlink(missing_ok=True)
        flags[name] = [fake_server.flag(f) for f in ("--threads", "--threads-batch", "--poll")]
        assert ("--no-repack" in running.launch.command) == ("--no-repack" in name)
    assert flags == {
        "as built, --poll 50": ["4", "4", "50"],
        "as built, --poll 0": ["4", "4", "0"],
        "as built, --poll 50, --threads / 2": ["2", "4", "50"],
        "OpenMP off, --poll 50": ["4", "4", "50"],
        "OpenMP off, --poll 0": ["4", "4", "0"],
        "OpenMP off, --poll 100": ["4", "4", "100"],
        "as built, --poll 50, --no-repack": ["4", "4", "50"],
        "OpenMP off, --poll 100, --no-repack": ["4", "4", "100"],
    }


async def test_the_peers_environment_is_the_users(running, fake_server):
    assert running.launch.added == {}
    assert fake_server.environment() == {
        name: value for name, value in os.environ.items() if not name.startswith(NOT_THE_USERS)
    }
