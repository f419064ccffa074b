"""Texts that are not to come, as the tokenizer spells them."""

from loraplex.core.sampling_params import SamplingParams
from loraplex.serving.served_model import with_bad_token_ids


def spell(text: str, add_special_tokens: bool = True) -> list[int]:
    """A token is a word with the space before it, as in most vocabularies."""
    assert not add_special_tokens
    return [hash_of(word) for word in text.replace(" ", "| ").strip("|").split("|") if word]


def hash_of(word: str) -> int:
    return int.from_bytes(word.encode(), "big")


def test_with_and_without_a_space_in_front():
    sampling = with_bad_token_ids(SamplingParams(bad_words=("rude",)), spell)
    assert sampling.bad_token_ids == ((hash_of("rude"),), (hash_of(" rude"),))
    assert sampling.bad_words == ()


def test_several_tokens_and_what_the_client_had_already():
    given = SamplingParams(bad_words=(" so rude",), bad_token_ids=((hash_of("x"),),))
    assert with_bad_token_ids(given, spell).bad_token_ids == (
        (hash_of("x"),),
        (hash_of(" so"), hash_of(" rude")),
        (hash_of("so"), hash_of(" rude")),
    )


def test_nothing_to_do():
    sampling = SamplingParams()
    assert with_bad_token_ids(sampling, spell) is sampling
