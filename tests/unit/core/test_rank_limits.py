"""Maximum ranks of adapters by the kind of module."""

import msgspec
import pytest

from loraplex.adapters.shapes import BaseShapes
from loraplex.core.config import ModelConfig
from loraplex.core.config_layers import Layer, field_layers, resolve
from loraplex.core.errors import AdapterTooLargeError, ConfigError
from loraplex.core.rank_limits import ModuleKind, RankLimits
from support.naming import naming

LIMITS = RankLimits(64, {"experts": 8, "router": 128})


@pytest.mark.parametrize(
    ("module", "limit"),
    [
        ("q_proj", 64),
        ("experts.gate_proj", 8),
        ("experts.down_proj", 8),
        ("shared_expert.down_proj", 64),
        ("shared_expert_gate", 64),
        ("router", 128),
        ("gate_proj", 64),
        ("lm_head", 64),
    ],
)
def test_a_kind_that_is_listed_has_its_own_limit(module: str, limit: int) -> None:
    assert LIMITS.of(module) == limit
    LIMITS.check(module, limit, "it")
    with pytest.raises(AdapterTooLargeError, match=naming(limit + 1, limit)):
        LIMITS.check(module, limit + 1, "it")


def test_the_error_names_the_setting() -> None:
    with pytest.raises(AdapterTooLargeError, match=naming("max_lora_ranks", 9, "experts.up_proj")):
        LIMITS.check("experts.up_proj", 9, "it")
    with pytest.raises(AdapterTooLargeError, match=naming("max_lora_rank", 65, "q_proj")):
        LIMITS.check("q_proj", 65, "it")


def test_lower_limits() -> None:
    assert LIMITS.largest == 128
    assert LIMITS.smallest == 8
    assert LIMITS.at_most(16) == RankLimits(16, {"experts": 8, "router": 16})
    assert str(LIMITS) == "64 (experts 8, router 128)"
    every_kind = RankLimits(64, dict.fromkeys(ModuleKind, 4))
    assert every_kind.largest == 4


class TestSetting:
    def config(self, *layers: Layer) -> ModelConfig:
        file = Layer("c.toml", {"models": {"m": {"path": "x", "max_lora_rank": 32}}})
        return resolve([file, *layers]).models["m"]

    def test_a_flag(self) -> None:
        flags = field_layers("flag --{flag}", {"max_lora_ranks": "experts=16, attention=64"}, "m")
        assert self.config(*flags).rank_limits == RankLimits(32, {"experts": 16, "attention": 64})

    def test_a_table_of_a_file(self) -> None:
        table = Layer("d.toml", {"models": {"m": {"max_lora_ranks": {"experts": 4}}}})
        assert self.config(table).rank_limits == RankLimits(32, {"experts": 4})

    def test_the_flag_replaces_the_table(self) -> None:
        table = Layer("d.toml", {"models": {"m": {"max_lora_ranks": {"experts": 4}}}})
        flags = field_layers("flag --{flag}", {"max_lora_ranks": "router=2"}, "m")
        assert self.config(table, *flags).max_lora_ranks == {"router": 2}

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ("expert=16", "for some of attention, mlp, experts, shared_expert, router, ends"),
            ("experts=0", "ranks of at least 1"),
            ("experts", "must be NAME=VALUE"),
            ("experts=x", "Expected `int`"),
        ],
    )
    def test_what_is_wrong_names_what_would_be_right(self, value: str, text: str) -> None:
        flags = field_layers("flag --{flag}", {"max_lora_ranks": value}, "m")
        with pytest.raises(ConfigError, match="flag --max-lora-ranks.*" + text):
            self.config(*flags)


def test_layers_that_differ() -> None:
    shapes = BaseShapes(
        3,
        {"q_proj": (4, 4), "gate_proj": (4, 8), "experts.gate_proj": (4, 2)},
        num_experts={"experts.gate_proj": 2},
        module_layers={"gate_proj": (0,), "experts.gate_proj": (1, 2)},
    )
    dense, *rest = shapes.of_layers()
    assert dense == {"q_proj": (4, 4), "gate_proj": (4, 8)}
    assert rest == [{"q_proj": (4, 4), "experts.gate_proj": (4, 2)}] * 2
    assert msgspec.json.decode(msgspec.json.encode(shapes), type=BaseShapes) == shapes
