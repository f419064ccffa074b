"""Baichuan, as Llama with what differs: linear biases for rotation, a head of unit rows."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support.families.llama_relatives import Config, LlamaRelative


class AlibiLlama(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """Llama without rotation, with a bias of the scores that is linear in the distance."""

    @classmethod
    def from_config(cls, config: LlamaConfig, **options: Any) -> "AlibiLlama":
        model: AlibiLlama = cls._from_config(config, **options)  # type: ignore[no-untyped-call]
        return model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Any:
        num_past = past_key_values.get_seq_length() if past_key_values is not None else 0
        return super().forward(
            input_ids=input_ids,
            attention_mask=self._biases(num_past, input_ids.shape[1]),
            position_ids=torch.zeros_like(input_ids),
            past_key_values=past_key_values,
            **options,
        )

    def _biases(self, num_past: int, num_new: int) -> torch.Tensor:
        """[1, heads, new, all]"""
        num_heads = self.config.num_attention_heads
        slopes = torch.tensor([2 ** (-8 * n / num_heads) for n in range(1, num_heads + 1)])
        keys = torch.arange(num_past + num_new)
        distances = keys - keys[num_past:, None]
        biases = slopes[:, None, None] * distances
        return biases.masked_fill(distances > 0, float("-inf")).unsqueeze(0).to(self.dtype)


class _UnitHead(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, torch.nn.functional.normalize(self.weight))


class UnitHeadLlama(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.lm_head = _UnitHead(config.hidden_size, config.vocab_size, bias=False)

    @classmethod
    def from_config(cls, config: LlamaConfig, **options: Any) -> "UnitHeadLlama":
        model: UnitHeadLlama = cls._from_config(config, **options)  # type: ignore[no-untyped-call]
        return model


def _length_13b(config: Config) -> Config:
    return {"model_max_length": config["max_position_embeddings"], "max_position_embeddings": None}


BAICHUAN_7B = LlamaRelative(architecture="BaiChuanForCausalLM", fused="self_attn.W_pack")
BAICHUAN_13B = LlamaRelative(
    architecture="BaichuanForCausalLM", fields=_length_13b, fused="self_attn.W_pack"
)
VOCAB_SIZE_2 = 125_696
"""Vocabulary of Baichuan 2, whose head has unit rows."""
