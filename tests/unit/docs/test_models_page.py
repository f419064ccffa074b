"""The table of families reads all layers, not the first one."""

import dataclasses

import pytest

from loraplex.models.specs.attention import OUTPUT, QKV
from support.tiny_decoder import tiny_spec
from tools import models_page


def without_attention(layer):
    linears = {name: group for name, group in layer.linears.items() if name not in (QKV, OUTPUT)}
    return dataclasses.replace(layer, mixer=None, linears=linears)


def row_of(monkeypatch, change):
    """Return the modules, positions and windows of a Llama with changed layers."""

    def read(_fields):
        spec = tiny_spec()
        return dataclasses.replace(
            spec, layers=tuple(change(index, layer) for index, layer in enumerate(spec.layers))
        )

    monkeypatch.setattr(models_page, "ARCHITECTURES", {"MixedForCausalLM": read})
    monkeypatch.setattr(read, "__module__", models_page.__name__)
    (row,) = (line for line in models_page.models_page().splitlines() if "`MixedFor" in line)
    return [cell.strip() for cell in row.split("|")[3:-1]]


@pytest.mark.parametrize("first", [0, 1])
def test_modules_are_those_of_all_layers(monkeypatch, first):
    modules, positions, windows = row_of(
        monkeypatch, lambda index, layer: layer if index == first else without_attention(layer)
    )
    assert {"`q_proj`", "`o_proj`", "`gate_proj`"} <= set(modules.split(", "))
    assert (positions, windows) == ("rotary", "none")


def test_a_model_without_attention_has_no_positions_and_windows(monkeypatch):
    modules, positions, windows = row_of(monkeypatch, lambda _, layer: without_attention(layer))
    assert "`q_proj`" not in modules
    assert (positions, windows) == ("none", "none")


def test_windows_of_some_layers(monkeypatch):
    def windowed(index, layer):
        window = 16 if index else None
        return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, window=window))

    assert row_of(monkeypatch, windowed)[2] == "some layers"
