"""Every file into staging: the pair folder, llgtrt's file, and what is neither."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from loraplex.adapters.canonical import read_canonical
from loraplex.adapters.formats.inputs import PairFolder
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.state_files import canonical_path
from loraplex.adapters.tensor_file import StagingLimits
from loraplex.core.errors import (
    AdapterMismatchError,
    AdapterTooLargeError,
    InvalidAdapterError,
    RequestError,
)
from loraplex.core.rank_limits import RankLimits
from support.naming import naming


def test_all_inputs_lead_to_one_adapter(staged, tmp_path, pair):
    weights = pair.weights()
    save_file({"weights": weights, "config": pair.CONFIG}, tmp_path / "v1.2.safetensors")
    paths = [
        pair.write(tmp_path / "pair"),
        pair.write(tmp_path / "batch", weights[None], pair.CONFIG[None]),
        pair.write(tmp_path / "keys", config_name="model.lora_keys.npy"),
        pair.write(tmp_path / "order", weights[::-1], pair.CONFIG[::-1]),
        tmp_path / "v1.2.safetensors",
    ]
    reports = [staged(path) for path in paths]
    assert len({report.source.digest for report in reports}) == 1
    canonical = tmp_path / "copy.safetensors"
    canonical.write_bytes(Path(reports[0].source.path).read_bytes())
    assert staged(canonical).source == reports[0].source
    assert reports[0].source.ranks == {"q_proj": (2, 2), "down_proj": (3, 3), "k_proj": (1, 1)}
    assert reports[0].warnings == ()
    assert not reports[0].changes_nothing


def test_the_rows_are_those_of_the_file(staged, tmp_path, pair):
    weights = pair.weights()
    got = staged(pair.write(tmp_path / "pair"))
    content = read_canonical(canonical_path(tmp_path / "state", got.source.digest))
    (row,) = (row for row in content.rows if row.module == "down_proj")
    np.testing.assert_array_equal(row.tensors["a"].array(), weights[1, :48].reshape(3, 16))
    np.testing.assert_array_equal(row.tensors["b"].array(), weights[1, 48:72].reshape(8, 3))
    assert (row.scale, row.layer, row.origin) == (1.0, 1, "model.layers.1.mlp.down_proj")


def test_bfloat16_as_raw_elements(staged, tmp_path, pair):
    bits = (pair.weights().view("<u4") >> 16).astype("<u2")
    got = staged(pair.write(tmp_path / "pair", bits.view("V2")))
    assert got.dtypes == ("BF16",)
    content = read_canonical(canonical_path(tmp_path / "state", got.source.digest))
    (row,) = (row for row in content.rows if row.module == "q_proj")
    wide = (bits[0, :16].astype("<u4") << 16).view("<f4")
    np.testing.assert_array_equal(row.tensors["a"].array().ravel(), wide)


class TestWhatIsThere:
    def test_the_new_name_of_the_config_wins(self, staged, tmp_path, pair):
        folder = pair.write(tmp_path / "pair")
        first = staged(folder).source.digest
        np.save(folder / "model.lora_keys.npy", np.zeros((1, 3), "<i4"))
        assert staged(folder).source.digest == first

    def test_a_peft_folder_is_one_even_with_a_pair_in_it(self, staged, peft_folder, pair):
        folder = peft_folder().write()
        first = staged(folder).source.digest
        pair.write(folder)
        assert staged(folder).source.digest == first

    @pytest.mark.parametrize("name", ["empty", "notes.txt", "adapter.npz"])
    def test_anything_else_lists_what_is_understood(self, staged, tmp_path, name):
        path = tmp_path / name
        path.write_text("x") if path.suffix else path.mkdir()
        with pytest.raises(InvalidAdapterError) as raised:
            staged(path)
        for understood in (
            "adapter_config.json",
            "adapter_model.safetensors",
            "adapter_model.bin",
            "model.lora_weights.npy",
            "model.lora_config.npy or model.lora_keys.npy",
            "the tensors weights and config",
            "canonical adapter file",
        ):
            assert understood in raised.value.message

    def test_another_safetensors_file_is_detected_by_its_tensors(self, staged, tmp_path):
        save_file({f"t{i}": np.zeros(1, "f4") for i in range(9)}, tmp_path / "x.safetensors")
        with pytest.raises(InvalidAdapterError, match=naming("t0", 4, "adapter_model.safetensors")):
            staged(tmp_path / "x.safetensors")

    def test_half_a_pair(self, staged, tmp_path, pair):
        folder = pair.write(tmp_path / "pair")
        os.unlink(folder / "model.lora_config.npy")
        with pytest.raises(
            InvalidAdapterError,
            match=naming("model.lora_config.npy", "model.lora_keys.npy", "model.lora_weights.npy"),
        ):
            staged(folder)

    def test_errors_of_a_pair_name_its_folder_and_keep_their_sentence(self, staged, tmp_path, pair):
        folder = pair.write(tmp_path / "pair", config=pair.CONFIG + np.array([0, 9, 0], "<i4"))
        with pytest.raises(AdapterMismatchError, match=naming("pair", "layerId", 0, 9)):
            staged(folder)


class TestStagingAgain:
    def test_an_unchanged_pair_is_not_parsed_again(self, staged, tmp_path, monkeypatch, pair):
        folder = pair.write(tmp_path / "pair")
        first = staged(folder)
        monkeypatch.setattr(PairFolder, "read_rows", None)
        again = staged(folder)
        assert again.was_known
        assert again.source == first.source

    def test_it_is_for_another_base(self, staged, tmp_path, pair):
        """The same values mean other matrices: q_proj (8, 12) and (12, 8) need as many."""
        folder = pair.write(
            tmp_path / "pair", np.ones((1, 20), "<f4"), pair.CONFIG[:1] - np.array([0, 0, 1], "<i4")
        )
        turned = BaseShapes(2, {"q_proj": (12, 8)})
        assert staged(folder).source.targets[0].in_features == 8
        assert staged(folder, shapes=turned).source.targets[0].in_features == 12

    def test_a_smaller_rank_gets_the_sentence_of_ranks(self, staged, tmp_path, pair):
        folder = pair.write(tmp_path / "pair")
        staged(folder)
        with pytest.raises(AdapterTooLargeError, match=naming("low_rank", 3, 2)):
            staged(folder, limits=StagingLimits(max_ranks=RankLimits(2)))


def test_every_error_is_the_client_s(staged, tmp_path, pair):
    """Random damage to a pair: never anything but a RequestError."""
    folder = pair.write(tmp_path / "pair")
    rng = np.random.default_rng(0)
    for name in ("model.lora_weights.npy", "model.lora_config.npy"):
        whole = (folder / name).read_bytes()
        for _ in range(60):
            damaged = bytearray(whole)
            damaged[rng.integers(0, 140)] = rng.integers(0, 256)
            (folder / name).write_bytes(damaged)
            with contextlib.suppress(RequestError):
                staged(folder)
        (folder / name).write_bytes(whole)
