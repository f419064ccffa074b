import pytest
from comparison.right_answers import check, generate_alone

from loraplex.core.errors import ConfigError

VOCABULARY = range(1000, 2000)


async def verdict(system, reference=None):
    running = await system.start_bare()
    found, _ = await check(running, VOCABULARY, system.weight_bits, reference)
    return found


@pytest.fixture
def system(fake_system, tmp_path):
    def make(*arguments, **fields):
        made = fake_system(*arguments, **fields)

        async def start_bare():
            return type(await _running(made))(made, 4)

        made.start_bare = start_bare
        return made

    async def _running(made):
        class Nothing:
            work = tmp_path
            adapters = ()

        return await made.start(Nothing)

    return make


@pytest.mark.parametrize("weight_bits", [32, 8])
async def test_an_honest_system_is_right(system, weight_bits):
    found = await verdict(system(weight_bits=weight_bits))
    assert found.is_right
    assert (found.num_equal, found.num_asked) == (30, 30)
    assert not found.is_compared_with_reference


@pytest.mark.parametrize("weight_bits", [32, 16, 8])
async def test_every_request_with_the_first_adapter_is_caught(system, weight_bits):
    def first(adapters, position):
        return next((a for a in adapters if a is not None), None)

    found = await verdict(system(weight_bits=weight_bits, mix=first))
    assert not found.is_right
    assert "the base in a mixed batch got the output of adapter 0" in found.problems
    assert "adapter 3 in a mixed batch got the output of adapter 0" in found.problems
    assert found.num_equal == 6


@pytest.mark.parametrize("weight_bits", [32, 8])
async def test_a_base_request_with_the_last_adapter_is_caught(system, weight_bits):
    def base_is_last(adapters, position):
        named = [a for a in adapters if a is not None]
        return adapters[position] if adapters[position] is not None or not named else named[-1]

    found = await verdict(system(weight_bits=weight_bits, mix=base_is_last))
    assert not found.is_right
    assert all(problem.startswith("the base in a mixed batch got") for problem in found.problems)
    assert found.num_equal == 24


def turned(from_token):
    def noise(adapter, text, batch_size):
        if adapter == 1 and batch_size > 1:
            return text[: 4 * from_token] + "!" * (len(text) - 4 * from_token)
        return text

    return noise


async def test_a_late_turn_is_rounding_only_in_narrow_weights(system):
    narrow = await verdict(system(weight_bits=8, noise=turned(5)))
    assert narrow.is_right
    assert narrow.num_equal == 24
    exact = await verdict(system(weight_bits=32, noise=turned(5)))
    assert exact.problems == ("adapter 1 in a mixed batch differs from itself at token 6",)


async def test_outputs_of_no_adapter_are_no_rounding(system):
    found = await verdict(system(weight_bits=8, noise=turned(0)))
    assert found.problems == ("adapter 1 in a mixed batch gives outputs of its own 6 times",)


async def test_ignored_adapters_are_caught(system):
    found = await verdict(system(mix=lambda adapters, position: None))
    assert "adapter 2 writes what the base writes" in found.problems


async def test_32_bits_are_compared_with_the_reference(system):
    reference = await generate_alone(await system().start_bare(), VOCABULARY)
    same = await verdict(system(), reference)
    assert same.is_right
    assert same.is_compared_with_reference
    swapped = [outputs | {2: outputs[2][:40] + "zzzzzzzz"} for outputs in reference]
    assert (await verdict(system(), swapped)).problems == (
        "adapter 2 alone differs from the reference at token 11",
    )
    narrow = await verdict(system(weight_bits=16), swapped)
    assert narrow.is_right
    assert not narrow.is_compared_with_reference


async def test_a_failure_is_no_wrong_output(system):
    with pytest.raises(ConfigError, match="failed while its outputs were checked"):
        await verdict(system(noise=lambda adapter, text, batch_size: text[:-4]))
