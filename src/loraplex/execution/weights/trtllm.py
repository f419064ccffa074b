"""The weights of a TensorRT-LLM checkpoint folder under their Hugging Face names.

Rank r of tp * pp files holds stage r // tp of the layers, which it numbers from 0, and part r % tp
of each of their matrices: rows of what reads the hidden states (dim 0), columns of what writes them
(dim 1). Where there are fewer key-value heads than parts, neighbours hold the same ones.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from loraplex.core.errors import ConfigError
from loraplex.execution.weights.tensor_files import SafetensorsFile
from loraplex.execution.weights.weight_files import rank_files
from loraplex.models.config_fields import ConfigFields, read_fields
from loraplex.models.engine_folder import CONFIG_NAME
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import AttentionSpec
from loraplex.models.trtllm_checkpoint import read_mapping

_LAYERS = "transformer.layers."
_EMBEDDING = "transformer.vocab_embedding"
_POSITIONS = "transformer.position_embedding"
_FINAL_NORM = "transformer.ln_f"
_IGNORED = re.compile(r".*(kv_cache_scaling_factor|kv_cache_rcp_scaling_factor|rotary_\w+)")
"""Scales of a quantised KV cache, for which ours has its own, and tables that are worked out."""

_Read = Callable[[], torch.Tensor]


class TrtllmWeights:
    """All ranks of a folder as one file of tensors, each joined when it is requested."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        """Raises ConfigError, which names the file and the weight."""
        self.path = folder
        self._spec = spec
        fields = read_fields(folder / CONFIG_NAME)
        self._tp_size, pp_size = read_mapping(fields)
        self._embedding_dim = _embedding_dim(fields)
        with contextlib.ExitStack() as stack:
            ranks = [stack.enter_context(_RankFile(path)) for path in rank_files(folder)]
            self._stages = [
                ranks[stage * self._tp_size : (stage + 1) * self._tp_size]
                for stage in range(pp_size)
            ]
            self._used: set[tuple[Path, str]] = set()
            self._reads = self._account()
            self.names: Sequence[str] = list(self._reads)
            """Hugging Face's."""
            self._refuse_unknown(ranks)
            self._stack = stack.pop_all()

    def __enter__(self) -> "TrtllmWeights":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def tensor(self, name: str) -> torch.Tensor:
        return self._reads[name]()

    def _account(self) -> Mapping[str, _Read]:
        names = self._spec.names
        first, last = self._stages[0], self._stages[-1]
        reads: dict[str, _Read] = {}
        for stored, ours, dim, ranks in (
            (_EMBEDDING, names.root + names.embedding, self._embedding_dim, first),
            (_POSITIONS, names.root + names.positions, self._embedding_dim, first),
            (_FINAL_NORM, names.root + names.final_norm, None, last),
            ("lm_head", names.lm_head, 0, last),
        ):
            self._add(reads, stored, ours, dim, ranks)
        head = f"{names.lm_head}.weight"
        if head in reads:
            reads[head] = functools.partial(self._without_padding, reads[head])
        index = 0
        for stage in self._stages:
            for position in range(stage[0].num_layers):
                self._add_layer(reads, f"{_LAYERS}{position}.", index, stage)
                index += 1
        return reads

    def _add_layer(
        self, reads: dict[str, _Read], stored: str, layer: int, ranks: Sequence["_RankFile"]
    ) -> None:
        names = self._spec.names
        ours = names.layer(layer)
        for theirs, name, dim in (
            ("input_layernorm", names.input_norm, None),
            ("post_layernorm", names.feed_forward_norm, None),
            ("attention.q_layernorm", names.q_norm, None),
            ("attention.k_layernorm", names.k_norm, None),
            ("attention.dense", names.o, 1),
            # The one that the activation is of is fc; what it gates is gate.
            *zip(("mlp.fc", "mlp.gate"), names.up, (0, 0), strict=False),
            ("mlp.proj", names.down, 1),
        ):
            self._add(reads, stored + theirs, ours + name, dim, ranks)
        self._add_qkv(reads, f"{stored}attention.qkv", layer, ranks)

    def _add(
        self,
        reads: dict[str, _Read],
        stored: str,
        ours: str,
        dim: int | None,
        ranks: Sequence["_RankFile"],
    ) -> None:
        """dim: along which the weight is split; a bias is split with the rows only."""
        is_linear = stored.startswith(_LAYERS) and "norm" not in stored
        for kind, split_dim in (("weight", dim), ("bias", 0 if dim == 0 else None)):
            parts = self._parts(f"{stored}.{kind}", ranks)
            if not parts:
                continue
            flips = is_linear and kind == "weight" and self._spec.names.has_transposed_weights
            reads[f"{ours}.{kind}"] = functools.partial(_joined, parts, split_dim, flips)

    def _add_qkv(
        self, reads: dict[str, _Read], stored: str, layer: int, ranks: Sequence["_RankFile"]
    ) -> None:
        names, attention = self._spec.names, self._spec.whole.layers[layer].mixer
        assert isinstance(attention, AttentionSpec), "TensorRT-LLM's checkpoints of other mixers"
        is_fused = len(names.qkv) == 1
        for kind in ("weight", "bias"):
            parts = self._parts(f"{stored}.{kind}", ranks)
            flips = kind == "weight" and names.has_transposed_weights
            for index, name in enumerate(names.qkv if parts else ()):
                chosen = range(3) if is_fused else (index,)
                reads[f"{names.layer(layer)}{name}.{kind}"] = functools.partial(
                    self._qkv, attention, parts, chosen, flips
                )

    def _qkv(
        self, attention: AttentionSpec, parts: Sequence[_Read], chosen: Sequence[int], flips: bool
    ) -> torch.Tensor:
        """Join the chosen ones of q, k and v (0, 1, 2), one below the other."""
        pieces = [self._split_qkv(attention, parts, which) for which in chosen]
        return _flipped(torch.cat(pieces), flips)

    def _split_qkv(
        self, attention: AttentionSpec, parts: Sequence[_Read], which: int
    ) -> torch.Tensor:
        """q, k or v (0, 1, 2) of all ranks; a rank has rows of q, then of k, then of v."""
        ranks = self._tp_size
        q_rows = attention.q_size // ranks
        kv_rows = max(1, attention.num_kv_heads // ranks) * attention.head_dim
        start = (0, q_rows, q_rows + kv_rows)[which]
        rows = q_rows if which == 0 else kv_rows
        repeats = 1 if which == 0 else max(1, ranks // attention.num_kv_heads)
        pieces = []
        for part in parts[::repeats]:
            tensor = part()
            if tensor.shape[0] != q_rows + 2 * kv_rows:
                raise ConfigError(
                    f"{self.path}: attention.qkv has {tensor.shape[0]} rows in a rank; "
                    f"{CONFIG_NAME} means {q_rows + 2 * kv_rows}"
                )
            pieces.append(tensor[start : start + rows])
        return torch.cat(pieces)

    def _parts(self, stored: str, ranks: Sequence["_RankFile"]) -> list[_Read]:
        """Return each rank's reader; empty if no rank has it. Raises ConfigError if some do."""
        having = [rank for rank in ranks if stored in rank.names]
        if having and len(having) < len(ranks):
            lacking = next(rank for rank in ranks if stored not in rank.names)
            raise ConfigError(f"{lacking.path} lacks {stored}, which {having[0].path.name} has")
        self._used |= {(rank.path, stored) for rank in having}
        return [functools.partial(rank.tensor, stored) for rank in having]

    def _without_padding(self, read: _Read) -> torch.Tensor:
        """Read without the padding that the lm_head of several ranks has."""
        return read()[: self._spec.vocab_size]

    def _refuse_unknown(self, ranks: Sequence["_RankFile"]) -> None:
        for rank in ranks:
            for name in sorted(rank.names):
                if (rank.path, name) not in self._used and not _IGNORED.fullmatch(name):
                    raise ConfigError(
                        f"{rank.path}: unknown weight {name}; {CONFIG_NAME} does not account for it"
                    )


def _embedding_dim(fields: ConfigFields) -> int | None:
    """Along which the vocabulary's table is split; None: each rank has all of it."""
    if not fields.boolean("use_parallel_embedding", False):
        return None
    return fields.optional_integer("embedding_sharding_dim") or 0


def _joined(parts: Sequence[_Read], dim: int | None, flips: bool) -> torch.Tensor:
    if dim is None or len(parts) == 1:
        return _flipped(parts[0](), flips)
    return _flipped(torch.cat([part() for part in parts], dim=dim), flips)


def _flipped(tensor: torch.Tensor, flips: bool) -> torch.Tensor:
    return tensor.t().contiguous() if flips else tensor


class _RankFile:
    """One GPU's file."""

    def __init__(self, path: Path) -> None:
        self._file = SafetensorsFile(path)
        self.path = path
        self.names = frozenset(self._file.names)
        of_layers = [name for name in self.names if name.startswith(_LAYERS)]
        self.num_layers = len({name.removeprefix(_LAYERS).split(".")[0] for name in of_layers})

    def __enter__(self) -> "_RankFile":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.__exit__(*exc_info)

    def tensor(self, name: str) -> torch.Tensor:
        tensor = self._file.tensor(name)
        assert isinstance(tensor, torch.Tensor)
        return tensor
