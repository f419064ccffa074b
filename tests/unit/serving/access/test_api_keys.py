"""Keys: drawn, hashed, and strong."""

import hashlib

import pytest

from loraplex.core.errors import ConfigError
from loraplex.serving.access.api_keys import check_strength, digest_of, new_key
from support.naming import naming


def test_new_keys_differ_and_are_strong():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    for key in keys:
        assert key.startswith("lpx_")
        assert len(key) == 4 + 43
        check_strength(key, "here")


def test_a_hash_is_sha256_of_the_whole_key():
    assert digest_of("lpx_abc") == hashlib.sha256(b"lpx_abc").digest()
    assert digest_of("\udcff")  # what came in a header is hashed, whatever it is


@pytest.mark.parametrize(
    "key",
    [
        "",
        "short",
        "password" * 8,
        "a" * 64,
        "0123" * 16,
        "lpx_" + "a" * 43,
        "with spaces and enough other characters, all of them",
        "ключ" * 20,
        "x" * 20 + "\n" + "abcdefghijklmnopqrstuv",
        "abcdefghijklmnopqrstuvwxyz0123456789" * 20,
    ],
)
def test_weak_and_odd_keys_are_refused_and_not_shown(key):
    with pytest.raises(ConfigError, match=r"^LORAPLEX_X: ") as raised:
        check_strength(key, "LORAPLEX_X")
    assert len(key) < 5 or key not in raised.value.message


@pytest.mark.parametrize(
    "key",
    ["f3a9" + "0c61d7b2" * 3 + "e584", hashlib.sha256(b"x").hexdigest(), "sk-" + "aB3dE5" * 8],
)
def test_keys_from_elsewhere(key):
    if key.startswith("sk-"):
        with pytest.raises(ConfigError):
            check_strength(key, "here")
    else:
        check_strength(key, "here")


LEAST_TEXT = "ghijklmnopqr" + "g" * 20
LEAST_HEX = "01234567" * 4


@pytest.mark.parametrize("key", [LEAST_TEXT, LEAST_HEX, LEAST_TEXT + "g" * (512 - 32)])
def test_just_strong_enough(key):
    check_strength(key, "here")


@pytest.mark.parametrize(
    ("key", "named"),
    [
        (LEAST_TEXT[:-1], ("here", "at least 32")),
        (LEAST_TEXT.replace("r", "g"), ("here", "at least 32")),
        (LEAST_HEX[:-1], ("here", "at least 32")),
        (LEAST_HEX.replace("7", "0"), ("here", "at least 32")),
        (LEAST_HEX + "x", ("here", "at least 32")),
        (LEAST_TEXT + "g" * (513 - 32), (512,)),
    ],
)
def test_just_not_strong_enough(key, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        check_strength(key, "here")
