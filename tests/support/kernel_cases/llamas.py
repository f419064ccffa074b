"""The shapes that kernels are compiled for, and fake arguments of a step."""

import dataclasses

import numpy as np
import torch

from loraplex.kernels.ops import AttentionShape, DeviceRows, RowLayout

GPU = torch.device("cuda", 0)
BLOCK_SIZE = 16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclasses.dataclass(frozen=True, slots=True)
class Llama:
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    vocab: int
    head_dim: int = 128

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, BLOCK_SIZE)

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """(in_features, out_features)"""
        hidden, inner = self.hidden, self.inner
        return {
            "q_proj": (hidden, self.q_size),
            "k_proj": (hidden, self.kv_size),
            "v_proj": (hidden, self.kv_size),
            "o_proj": (self.q_size, hidden),
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }


LLAMA_3_1_8B = Llama(4096, 14336, 32, 8, 128256)
LLAMA_2_7B = Llama(4096, 11008, 32, 32, 32000)
LLAMAS = {"8b": LLAMA_3_1_8B, "7b": LLAMA_2_7B}


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor on the GPU; call it where tensors are fake."""
    return torch.empty(shape, dtype=dtype, device=GPU)


def decode_rows(num_rows: int, max_blocks: int = 128) -> RowLayout:
    """Rows of one token each."""
    return mixed_rows([1] * num_rows, max_blocks)


def mixed_rows(num_tokens: list[int], max_blocks: int = 128) -> RowLayout:
    """Return rows of these token counts, after 1000 cached tokens each."""
    starts = np.concatenate(([0], np.cumsum(num_tokens))).tolist()
    num_rows = len(num_tokens)
    on_device = DeviceRows(
        empty(num_rows + 1, dtype=torch.int32),
        empty(num_rows, dtype=torch.int32),
        empty(num_rows, dtype=torch.int32),
        empty(256, max_blocks, dtype=torch.int32),
    )
    lengths = [1000 + number for number in num_tokens]
    return RowLayout(starts, lengths, empty(0, 0, dtype=torch.int64), on_device)
