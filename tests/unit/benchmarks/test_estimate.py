import msgspec
import pytest
from comparison.cases import stages
from comparison.estimate import estimated_seconds, token_bytes
from comparison.journal import ComparisonSettings, Limits
from comparison.shapes import LLAMA_8B, QWEN_1_5B, TINY
from comparison.sizes import SHORT

SETTINGS = ComparisonSettings(
    model="llama-3.1-8b",
    num_parameters=1,
    groups=("W1", "W2", "W3", "W4", "held"),
    rounds=2,
    num_threads=2,
    num_many=6,
    seed=0,
    is_restarting=True,
)


def limits(**fields) -> Limits:
    sizes = {name: token_bytes(LLAMA_8B, name) for name in ("gguf:Q4_K_M", "gguf:Q8_0")}
    return Limits(**{"read_bytes": 4e10, "flops": 2.4e11, "token_bytes": sizes} | fields)


def test_a_token_reads_all_but_an_embedding_apart():
    assert token_bytes(LLAMA_8B, "gguf:Q4_K_M") == pytest.approx(4.62e9, rel=0.01)
    assert token_bytes(LLAMA_8B, "gguf:Q8_0") == pytest.approx(7.97e9, rel=0.01)
    assert token_bytes(QWEN_1_5B, "16-bit") == 2 * QWEN_1_5B.num_parameters
    embedding = TINY.vocab_size * TINY.hidden_size
    assert token_bytes(TINY, "8-bit") == TINY.num_parameters - embedding


def test_a_slower_machine_and_more_variants_take_longer(fake_system):
    system = fake_system("loraplex gguf:Q4_K_M", 4)
    system.weights = "gguf:Q4_K_M"
    tried = fake_system("llama.cpp gguf:Q4_K_M", 4)
    tried.weights = "gguf:Q4_K_M"
    tried.variants = {"a": tried, "b": tried}
    planned = stages(SETTINGS.groups, 6, 0, SHORT)
    arguments = [system, tried], planned, SETTINGS, SHORT
    found = estimated_seconds(LLAMA_8B, limits(), *arguments)
    assert found[tried.name] > found[system.name] > 60
    few = msgspec.structs.replace(SETTINGS, variants=("of another system",))
    untried = estimated_seconds(LLAMA_8B, limits(), [system, tried], planned, few, SHORT)
    assert untried[tried.name] == found[system.name]
    slower = estimated_seconds(LLAMA_8B, limits(flops=1.2e11), *arguments)
    assert found[system.name] < slower[system.name] < 2.5 * found[system.name]


def test_two_systems_of_the_8b_shape_take_at_most_30_minutes(fake_system):
    """Limits of two cores of 2026: 35 GB/s, 236 GFLOP/s in float32."""
    systems = []
    for name in ("loraplex", "llama.cpp"):
        system = fake_system(f"{name} gguf:Q4_K_M", 4)
        system.weights = "gguf:Q4_K_M"
        systems.append(system)
    planned = stages(SETTINGS.groups, 6, 0, SHORT)
    machine = limits(read_bytes=3.5e10, flops=2.36e11)
    found = estimated_seconds(LLAMA_8B, machine, systems, planned, SETTINGS, SHORT)
    assert sum(found.values()) < 1800
