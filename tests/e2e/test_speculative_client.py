"""A draft and a target model write what the ensemble writes, whichever model drafts."""

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from loraplex.compat.client import speculative_client
from loraplex.compat.client.programs import SPECULATION_FLAGS
from loraplex.core.errors import ConfigError
from support.capitals.corpus import COUNTRIES, capital_of, founding_prompts
from support.program_options import program_options
from support.triton_requests import i32, tensors

pytestmark = pytest.mark.xdist_group("server")

FRANCE = next(country for country in COUNTRIES if country.english == "France")
PROMPT = founding_prompts(FRANCE)["english"]


def address(server):
    return f"127.0.0.1:{server.grpc_port}"


@pytest.fixture
def speculated(server):
    def run(**given):
        lines = []
        options = program_options(
            SPECULATION_FLAGS, url_target=address(server), prompt=PROMPT, **given
        )
        assert speculative_client.run(options, lines.append) == 0
        *rounds, title, text = lines
        assert title == "Final text:"
        return text.removeprefix(" "), rounds

    return run


def ensemble(server, output_len, **more):
    with triton_grpc.InferenceServerClient(address(server)) as client:
        text = np.array([[PROMPT]], dtype=object)
        inputs = tensors(triton_grpc, text_input=text, max_tokens=i32(output_len), **more)
        return client.infer("ensemble", inputs).as_numpy("text_output")[0].decode()


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 50])
@pytest.mark.parametrize("output_len", [1, 4, 24])
def test_the_text_is_the_ensembles(server, speculated, num_draft_tokens, output_len):
    text, _ = speculated(output_len=output_len, num_draft_tokens=num_draft_tokens)
    assert text == ensemble(server, output_len)
    assert output_len < 24 or text.endswith(capital_of(FRANCE, "english"))


def test_draft_tokens_make_few_rounds(speculated):
    _, alone = speculated(output_len=24, num_draft_tokens=0, verbose=True)
    _, drafted = speculated(output_len=24, num_draft_tokens=7, verbose=True)
    rounds = [len([line for line in lines if "Target" in line]) for lines in (alone, drafted)]
    assert rounds == [3, 1]
    assert drafted[0].startswith("draft_tokens: [")


def test_a_stop_word_ends_it(server, speculated):
    stop = capital_of(FRANCE, "english")[:3]
    words = np.array([[stop]], dtype=object)
    text, _ = speculated(output_len=24, stop_words=(stop,))
    assert text == ensemble(server, 24, stop_words=words)
    assert text.endswith(stop)


def test_logits_are_shown(speculated):
    _, lines = speculated(
        output_len=2, num_draft_tokens=1, verbose=True, return_draft_model_draft_logits=True
    )
    assert any("draft tokens' logits: (1, 1, 1," in line for line in lines)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"beam_width": 2}, "--beam-width 2"),
        ({"output_len": 0}, "--output-len must be at least 1"),
        ({"num_draft_tokens": -1}, "--num-draft-tokens must be at least 0"),
        (
            {
                "return_draft_model_draft_logits": True,
                "return_target_model_accepted_token_logits": True,
            },
            "not from both",
        ),
        ({"url_target": "127.0.0.1:1"}, "127.0.0.1:1"),
    ],
)
def test_what_cannot_be(given, expected):
    options = program_options(
        SPECULATION_FLAGS, **{"url_target": "127.0.0.1:1", "prompt": "p", **given}
    )
    with pytest.raises(ConfigError, match=expected):
        speculative_client.run(options, print)
