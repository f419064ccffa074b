import pytest

from loraplex.memory.kv_salt import kv_salt, salt_with_input

ARGUMENTS = {
    "model": "llama",
    "kv_dtype": "bfloat16",
    "adapters": (("aa", 1.0), ("bb", 0.5)),
    "tenant": "default",
}


def test_is_a_function_of_its_arguments():
    assert kv_salt(**ARGUMENTS) == kv_salt(**ARGUMENTS)
    assert len(kv_salt(**ARGUMENTS)) == 32


@pytest.mark.parametrize(
    "change",
    [
        {"model": "llama2"},
        {"kv_dtype": "int8"},
        {"tenant": "other"},
        {"adapters": ()},
        {"adapters": (("aa", 1.0),)},
        {"adapters": (("aa", 1.0), ("bb", 0.25))},
        {"adapters": (("aa", 1.0), ("bc", 0.5))},
        {"adapters": (("bb", 0.5), ("aa", 1.0))},
        {"adapters": (("aa", 0.5), ("bb", 1.0))},
        {"adapters": (("aa", 1.0), ("bb", 0.5), ("bb", 0.5))},
        {"cache_salt": "mine"},
    ],
)
def test_every_argument_counts(change):
    assert kv_salt(**ARGUMENTS) != kv_salt(**{**ARGUMENTS, **change})


def test_fields_do_not_run_into_each_other():
    salts = {
        kv_salt("ab", "c", (), "d"),
        kv_salt("a", "bc", (), "d"),
        kv_salt("a", "b", (), "cd"),
        kv_salt("abc", "", (), "d"),
        kv_salt("abcd", "", (), ""),
        kv_salt("", "", (), "abcd"),
        kv_salt("ab", "c", (("d", 1.0),), ""),
        kv_salt("ab", "c", (("", 1.0),), "d"),
        kv_salt("a", "bkv_dtypec", (), "d"),
        kv_salt("akv_dtypeb", "c", (), "d"),
        kv_salt("ab", "c", (), "", "d"),
        kv_salt("ab", "c", (), "dcache_salt", ""),
    }
    assert len(salts) == 12


def test_a_salt_has_all_of_an_encoder_input():
    salt = kv_salt(**ARGUMENTS)
    inputs = [(), (1,), (1, 2), (2, 1), (1, 2, 0), (2**40,)]
    assert len({salt_with_input(salt, tokens) for tokens in inputs}) == len(inputs)
    assert salt_with_input(kv_salt(**{**ARGUMENTS, "tenant": "b"}), (1,)) != salt_with_input(
        salt, (1,)
    )
