"""Files that requests carry: pairs, tables and token ids; and what is refused."""

import pickle

import numpy as np
import pytest

from loraplex.compat.client.request_parts import (
    BFLOAT16_BITS,
    bfloat16_bits,
    read_lora_pair,
    read_prompt_table,
    read_token_ids,
)
from loraplex.core.errors import ConfigError
from support.naming import naming


def write_pair(folder, weights=None, config=None, config_name="model.lora_config.npy"):
    if weights is None:
        weights = np.ones((1, 2, 8), np.float16)
    if config is None:
        config = np.array([[[1, 0, 1], [2, 0, 1]]], np.int32)
    np.save(folder / "model.lora_weights.npy", weights)
    np.save(folder / config_name, config)
    return str(folder)


@pytest.mark.parametrize("config_name", ["model.lora_config.npy", "model.lora_keys.npy"])
def test_a_pair(tmp_path, config_name):
    weights, config = read_lora_pair(write_pair(tmp_path, config_name=config_name)).values()
    assert (weights.shape, weights.dtype) == ((1, 2, 8), np.float16)
    assert (config.shape, config.dtype) == ((1, 2, 3), np.int32)


def test_a_batch_dimension_is_added(tmp_path):
    folder = write_pair(tmp_path, np.ones((2, 8), np.float32), np.ones((2, 4), np.int64))
    weights, config = read_lora_pair(folder).values()
    assert (weights.shape, config.shape, config.dtype) == ((1, 2, 8), (1, 2, 4), np.int32)


def test_bfloat16_stays_raw(tmp_path):
    folder = write_pair(tmp_path, np.zeros((1, 2, 8), np.uint16).view("V2"))
    assert read_lora_pair(folder)["lora_weights"].dtype == BFLOAT16_BITS


@pytest.mark.parametrize(
    ("weights", "config", "named"),
    [
        (np.ones((1, 2, 8), np.int32), None, ("float16", "float32", "bfloat16")),
        (None, np.ones((1, 2, 3), np.float32), ("int32",)),
        (np.ones((2, 2, 8), np.float16), None, ("[2, 2, 8]", "[1, rows, columns]")),
    ],
)
def test_wrong_pairs(tmp_path, weights, config, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        read_lora_pair(write_pair(tmp_path, weights, config))


def test_a_folder_without_a_pair(tmp_path):
    with pytest.raises(ConfigError, match=naming("loraplex compat convert-lora")):
        read_lora_pair(str(tmp_path))


def test_nothing_is_unpickled(tmp_path):
    write_pair(tmp_path)
    (tmp_path / "model.lora_weights.npy").write_bytes(pickle.dumps(np.ones((1, 2, 8))))
    with pytest.raises(ConfigError, match=naming("NumPy")):
        read_lora_pair(str(tmp_path))
    np.save(tmp_path / "model.lora_weights.npy", np.array([[[{}]]], object), allow_pickle=True)
    with pytest.raises(ConfigError, match=naming("NumPy")):
        read_lora_pair(str(tmp_path))


def test_token_ids(tmp_path):
    path = tmp_path / "ids.csv"
    path.write_text("1, 2,30\n4\n")
    assert read_token_ids(str(path)) == [1, 2, 30]


@pytest.mark.parametrize("content", ["", "1,two", "\n1"])
def test_no_token_ids(tmp_path, content):
    path = tmp_path / "ids.csv"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"ids\.csv"):
        read_token_ids(str(path))
    with pytest.raises(ConfigError, match=r"none\.csv"):
        read_token_ids(str(tmp_path / "none.csv"))


def test_prompt_tables(tmp_path):
    path = tmp_path / "table.npy"
    np.save(path, np.full((3, 4), 1.5, np.float32))
    assert read_prompt_table(str(path), "float16").dtype == np.float16
    table = read_prompt_table(str(path), "bfloat16")
    assert (table.shape, table.dtype) == ((1, 3, 4), BFLOAT16_BITS)
    assert set(table.view(np.uint16).ravel().tolist()) == {0x3FC0}


def test_bfloat16_is_rounded_to_nearest():
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5, np.inf, np.nan], np.float32)
    bits = bfloat16_bits(values).view(np.uint16)
    back = (bits.astype(np.uint32) << 16).view(np.float32)
    assert back[:5].tolist() == [1.0, 1.0, 1.015625, -2.5, np.inf]
    assert np.isnan(back[5])
