"""Rewrites a saved Llama, or an adapter of one, as a family that transformers has no class of."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
JoinRows = Callable[[list[torch.Tensor], Config], torch.Tensor]
_PARTS = ("q_proj", "k_proj", "v_proj")
_PART = re.compile(r"self_attn\.([qkv]_proj)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlamaRelative:
    """A family whose tensors are Llama's under other names, perhaps with q, k and v in one."""

    architecture: str
    fields: Callable[[Config], Config] = lambda config: {}
    """Returns the fields that differ from the Llama's config.json."""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fused: str = ""
    """Name of the fused projection within a layer; empty: there is none."""
    join_rows: JoinRows = lambda parts, config: torch.cat(parts)
    """Joins the rows of q, k and v."""

    def __call__(self, folder: Path) -> None:
        if (folder / "adapter_config.json").is_file():
            if self.fused:
                self._convert_adapter(folder, read(folder.parent.parent / "config.json"))
            return
        config = read(folder / "config.json")
        tensors = load_file(folder / "model.safetensors")
        if self.fused:
            tensors = self._fuse(tensors, config)
        save_file(self._renamed(tensors), folder / "model.safetensors")
        changes = {"architectures": [self.architecture], **self.fields(config)}
        (folder / "config.json").write_text(json.dumps(config | changes))

    def _renamed(self, tensors: Tensors) -> Tensors:
        renamed = {}
        for name, tensor in tensors.items():
            for old, new in self.names.items():
                name = name.replace(old, new)
            renamed[name] = tensor.contiguous()
        return renamed

    def _fuse(self, tensors: Tensors, config: Config) -> Tensors:
        """Fuse the weights and biases of a checkpoint."""
        fused = {}
        for name, tensor in tensors.items():
            part = _PART.search(name)
            if part is None:
                fused[name] = tensor
            elif part[1] == "q_proj":
                parts = [tensors[name.replace("q_proj", other)] for other in _PARTS]
                fused[_PART.sub(self.fused, name)] = self.join_rows(parts, config)
        return fused

    def _convert_adapter(self, folder: Path, base: Config) -> None:
        """Fuse LoRA of q, k and v: A side by side, B as blocks, which hold the scales."""
        config = read(folder / "adapter_config.json")
        tensors = load_file(folder / "adapter_model.safetensors")
        fused: Tensors = {}
        for name in [name for name in tensors if "lora_A" in name]:
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            tensors[_b(name)] *= scale(config, path, len(tensors[name]))
        for name, a in tensors.items():
            part = _PART.search(name)
            if part is None:
                fused[name] = a
            elif "lora_A" in name:
                places = [_PART.sub(f"self_attn.{other}", name) for other in _PARTS]
                target = _PART.sub(self.fused, name)
                fused[target] = torch.cat([tensors[p] for p in places if p in tensors])
                fused[_b(target)] = self.join_rows(_blocks(tensors, places, base), base)
        fused = self._renamed(fused)
        ranks = {
            name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): len(tensor)
            for name, tensor in fused.items()
            if "lora_A" in name
        }
        changes = {"target_modules": list(ranks), "rank_pattern": ranks, "alpha_pattern": ranks}
        (folder / "adapter_config.json").write_text(json.dumps(config | changes))
        save_file(fused, folder / "adapter_model.safetensors")


def read(path: Path) -> Config:
    config: Config = json.loads(path.read_text())
    return config


def scale(config: Config, path: str, rank: int) -> float:
    """Return PEFT's factor of a module."""
    alphas = config["alpha_pattern"].items()
    own = [alpha for key, alpha in alphas if re.fullmatch(rf"(.*\.)?({key})", path)]
    return float((own or [config["lora_alpha"]])[0] / rank)


def _b(name: str) -> str:
    return name.replace("lora_A", "lora_B")


def _blocks(tensors: Tensors, places: list[str], base: Config) -> list[torch.Tensor]:
    """Return the rows of the fused B for q, k and v; zeros for those without LoRA."""
    ranks = [len(tensors[place]) if place in tensors else 0 for place in places]
    head_dim = base["hidden_size"] // base["num_attention_heads"]
    num_heads = [base["num_attention_heads"], *[base["num_key_value_heads"]] * 2]
    blocks, first = [], 0
    for place, rank, heads in zip(places, ranks, num_heads, strict=True):
        block = torch.zeros(heads * head_dim, sum(ranks))
        if rank:
            block[:, first : first + rank] = tensors[_b(place)]
        blocks.append(block)
        first += rank
    return blocks


def rows_by_group(parts: list[torch.Tensor], config: Config) -> torch.Tensor:
    """Return, for each key head, the rows of its queries, of itself and of its value."""
    num_groups = config["num_key_value_heads"]
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    grouped = [part.view(num_groups, -1, head_dim, *part.shape[1:]) for part in parts]
    joined = torch.cat(grouped, dim=1)
    return joined.reshape(-1, *joined.shape[3:])


def _biases_2(config: Config) -> Config:
    return {"bias": config["attention_bias"], "attention_bias": None}


def _biases_3(config: Config) -> Config:
    names = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}
    return {new: config[old] for new, old in names.items()} | dict.fromkeys(names.values())


INTERNLM2 = LlamaRelative(
    architecture="InternLM2ForCausalLM",
    fields=_biases_2,
    names={
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    },
    fused="attention.wqkv",
    join_rows=rows_by_group,
)
INTERNLM3 = LlamaRelative(architecture="InternLM3ForCausalLM", fields=_biases_3)
MISTRAL = LlamaRelative(architecture="MistralForCausalLM")
