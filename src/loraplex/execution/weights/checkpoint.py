"""Tensors of a model folder by their Hugging Face names, each read when it is requested.

Reads safetensors, and `.bin` files with torch's restricted unpickler only; both are mapped. Every
tensor must be accounted for: one that is missing, unknown, twice there or of another shape is an
error.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from loraplex.core.errors import ConfigError
from loraplex.execution.weights.quantized.files import QuantizedFiles
from loraplex.execution.weights.quantized.gguf import GgufWeights
from loraplex.execution.weights.quantized.stored_weight import StoredWeight
from loraplex.execution.weights.tensor_files import PickledFile, SafetensorsFile, TensorFile
from loraplex.execution.weights.trtllm import TrtllmWeights
from loraplex.execution.weights.weight_files import weight_files
from loraplex.kernels.block_rows import BlockRows
from loraplex.models.decoder_names import StackedExperts
from loraplex.models.engine_folder import is_foreign_checkpoint
from loraplex.models.gguf_config import gguf_of
from loraplex.models.parameters import checkpoint_shapes
from loraplex.models.spec import ModelSpec


@dataclasses.dataclass(frozen=True, slots=True)
class StackedTensor:
    """One of these tensors, as the configuration means it."""

    name: str
    """Full name."""
    form: StackedExperts
    prefix: str
    """Prefix of the names of the layer's parts."""
    num_experts: int
    sizes: tuple[int, ...]
    """Outputs of each part."""
    in_features: tuple[int, ...]
    """Inputs of a weight; empty for biases."""

    def parts(self) -> Iterator[tuple[str, "StackedPart"]]:
        """Yield the tensors that are in it, with their full names."""
        for expert in range(self.num_experts):
            for number, part in enumerate(self.form.parts):
                yield self.prefix + part.format(expert=expert), StackedPart(self, expert, number)

    @property
    def has_two_readings(self) -> bool:
        """Whether the shape leaves open which of its axes are the outputs."""
        return self.form.is_transposed is None and (sum(self.sizes),) == self.in_features

    def is_transposed(self, shape: torch.Size) -> bool:
        """Whether a tensor of this shape, which has one reading, is [experts, in, out]."""
        if self.form.is_transposed is not None:
            return self.form.is_transposed and bool(self.in_features)
        return shape == self.shape(is_transposed=True) != self.shape(is_transposed=False)

    def shape(self, *, is_transposed: bool) -> tuple[int, ...]:
        features = (sum(self.sizes), *self.in_features)
        return (self.num_experts, *(features[::-1] if is_transposed else features))


class StackedPart(NamedTuple):
    """Tensor of one expert within a tensor of all."""

    whole: StackedTensor
    expert: int
    number: int
    """Place of the part among those of an expert."""

    def view(self, tensor: torch.Tensor, *, is_transposed: bool) -> torch.Tensor:
        """Return the part of the whole tensor: [out, in], or a bias [out]."""
        rows = tensor[self.expert].T if is_transposed else tensor[self.expert]
        sizes = self.whole.sizes
        if self.whole.form.is_interleaved:
            return rows[self.number :: len(sizes)]
        first = sum(sizes[: self.number])
        return rows[first : first + sizes[self.number]]


def stacked_tensors(
    spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, StackedTensor]:
    """Return those that a checkpoint may have, by full name. shapes: of each expert's tensors."""
    found: dict[str, StackedTensor] = {}
    for index, layer in enumerate(spec.layers):
        routing = None if layer.feed_forward is None else layer.feed_forward.routing
        prefix = spec.names.layer(index)
        for form in spec.names.experts.stacked_forms if routing else ():
            first_parts = [shapes.get(prefix + part.format(expert=0)) for part in form.parts]
            if routing is None or None in first_parts:
                continue  # biases, in a model without
            sizes, inputs = zip(*((part[0], part[1:]) for part in first_parts if part), strict=True)
            name = prefix + form.tensor
            tensor = StackedTensor(name, form, prefix, routing.num_experts, sizes, inputs[0])
            found |= {name: tensor, f"{name}.weight": tensor}
    return found


logger = logging.getLogger(__name__)

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Checkpoint:
    """The open files of one folder. What `read` gave is valid until the checkpoint is closed."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        """Raises ConfigError, which names the file and the weight."""
        spec = spec.all_layers
        self._shapes = checkpoint_shapes(spec)
        self._stacked = stacked_tensors(spec, self._shapes)
        self._entries: dict[str, _PlacedTensor] = {}
        self._zeros: list[str] = []
        self._is_transposed: bool | None = None
        with contextlib.ExitStack() as stack:
            for file in open_files(folder, spec):
                self._add(stack.enter_context(file), spec)
            self._note_zeros(folder)
            missing = sorted(self._shapes.keys() - self._entries.keys())
            if missing:
                raise ConfigError(
                    f"{folder} lacks {len(missing)} weights of {spec.architecture}, "
                    f"the first of them {missing[0]}"
                )
            self._is_transposed = _common_order(self._entries.values())
            self._stack = stack.pop_all()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self._entries)

    def close(self) -> None:
        self._stack.close()
        self._entries.clear()

    def read(self, name: str) -> torch.Tensor:
        """A tensor of the shape that the configuration means, on the host; not to be written to."""
        entry = self._entries[name]
        path, part, tensor = entry.file.path, entry.part, entry.tensor
        if part is None:
            return _checked(tensor, self._shapes[name], f"{path}: {name}")
        whole = part.whole
        is_transposed = (
            self._is_transposed if whole.has_two_readings else whole.is_transposed(tensor.shape)
        )
        if is_transposed is None:
            raise ConfigError(
                f"{path}: {whole.name} has shape {list(tensor.shape)}, which may mean "
                "[experts, outputs, inputs] or [experts, inputs, outputs]; "
                "save the checkpoint with a tensor for each expert"
            )
        shape = whole.shape(is_transposed=is_transposed)
        checked = _checked(tensor, shape, f"{path}: {whole.name}")
        return part.view(checked, is_transposed=is_transposed)

    def stored(self, name: str, shape: tuple[int, int]) -> StoredWeight | None:
        """Return a quantised weight [out, in] as it is stored; None: it is not quantised.

        Raises ConfigError for one of another shape.
        """
        entry = self._entries[name]
        if not isinstance(entry.file, QuantizedFiles | GgufWeights):
            return None
        stored = entry.file.stored(entry.name)
        if stored is not None and entry.part is not None:
            stored = stored.rows(functools.partial(entry.part.view, is_transposed=False))
        if stored is not None and stored.shape != shape:
            raise _other_shape(f"{entry.file.path}: {name}", stored.shape, shape)
        return stored

    def blocks(self, name: str, shape: tuple[int, int]) -> BlockRows | None:
        """Return a weight [out, in] as blocks of a file; None: `stored` or `read` has it.

        Raises ConfigError for one of another shape.
        """
        entry = self._entries[name]
        found = entry.file.blocks(entry.name) if isinstance(entry.file, GgufWeights) else None
        if found is not None and entry.part is not None:
            found = found.rows(functools.partial(entry.part.view, is_transposed=False))
        if found is not None and found.shape != shape:
            raise _other_shape(f"{entry.file.path}: {name}", found.shape, shape)
        return found

    def stacked_names(self, names: Iterable[str]) -> set[str]:
        """Return what files call the tensors that hold these together with others."""
        entries = map(self._entries.__getitem__, names)
        return {entry.name for entry in entries if entry.part is not None}

    def _add(self, file: "TensorFile", spec: ModelSpec) -> None:
        for name in file.names:
            full_name = spec.names.canonical(name)
            if full_name is None or _is_redundant(full_name, spec):
                continue
            if full_name in self._shapes:
                self._put(full_name, _PlacedTensor(file, name))
            elif full_name in self._stacked:
                for own_name, part in self._stacked[full_name].parts():
                    self._put(own_name, _PlacedTensor(file, name, part))
            elif self._is_zero_bias(file, name, full_name):
                self._zeros.append(name)
            else:
                raise ConfigError(
                    f"{file.path}: unknown weight {name}; config.json does not account for it"
                )

    def _is_zero_bias(self, file: TensorFile, name: str, full_name: str) -> bool:
        """Whether it is a bias that a layer does not have, and adds nothing.

        Raises ConfigError for one that is not zero.
        """
        module = full_name.removesuffix(".bias")
        if module == full_name or f"{module}.weight" not in self._shapes:
            return False
        bias = file.tensor(name)
        if isinstance(bias, torch.Tensor) and not bool(bias.count_nonzero()):
            return True
        raise ConfigError(
            f"{file.path}: {name} is a bias that is not zero; by config.json the layer has none"
        )

    def _note_zeros(self, folder: Path) -> None:
        # AutoGPTQ wrote a bias for every layer (AutoGPTQ#555).
        if self._zeros:
            logger.info(
                "%s: %d biases that are zero, such as %s, are left out: by config.json their "
                "layers have none",
                *(folder, len(self._zeros), self._zeros[0]),
            )

    def _put(self, name: str, entry: "_PlacedTensor") -> None:
        other = self._entries.setdefault(name, entry)
        if other is entry:
            return
        if entry.part is other.part is None:
            raise ConfigError(f"{entry.file.path}: weight {entry.name} occurs twice")
        raise ConfigError(
            f"{entry.file.path}: weight {name} occurs twice: in {entry.name} and in {other.name}"
        )


def _checked(tensor: Any, shape: tuple[int, ...], what: str) -> torch.Tensor:
    """Return what a file holds, if it is a tensor of floats of this shape."""
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{what} is not a tensor but {type(tensor).__name__}")
    if tensor.shape != shape:
        raise _other_shape(what, tensor.shape, shape)
    if tensor.dtype not in _FLOATS:
        raise ConfigError(f"{what} is {tensor.dtype}; floating-point weights are supported")
    return tensor


def _other_shape(what: str, found: Sequence[int], meant: Sequence[int]) -> ConfigError:
    return ConfigError(f"{what} has shape {list(found)}, config.json means {list(meant)}")


def _is_redundant(name: str, spec: ModelSpec) -> bool:
    """Whether it is the output layer of a model that has it in the embedding, or has no use for it.

    Tied checkpoints may store the embedding twice; stored_head compared the two.
    """
    is_unused = spec.tie_word_embeddings or not spec.is_causal
    return is_unused and name == f"{spec.names.lm_head}.weight"


class _PlacedTensor(NamedTuple):
    """Where a tensor is, and what it is called there."""

    file: TensorFile
    name: str
    part: StackedPart | None = None
    """Part of it that is meant; None: all of it."""

    @property
    def tensor(self) -> Any:
        return self.file.tensor(self.name)


def _common_order(entries: Iterable[_PlacedTensor]) -> bool | None:
    """Return whether all tensors that hold several experts are transposed; None: not all the same.

    Those with an order of their own, or with two readings, do not count.
    """
    firsts = (
        (entry.part.whole, entry)
        for entry in entries
        if entry.part is not None and entry.part[1:] == (0, 0)
    )
    orders = {
        whole.is_transposed(entry.tensor.shape)
        for whole, entry in firsts
        if whole.form.is_transposed is None and whole.in_features and not whole.has_two_readings
    }
    return orders.pop() if len(orders) == 1 else None


def open_files(folder: Path, spec: ModelSpec) -> Iterator[TensorFile]:
    """Yield the files of weights, open."""
    if is_foreign_checkpoint(folder):
        yield TrtllmWeights(folder, spec)
        return
    if gguf := gguf_of(folder):
        yield GgufWeights(gguf[0], spec)
        return
    files = [
        SafetensorsFile(path) if path.suffix == ".safetensors" else PickledFile(path)
        for path in weight_files(folder)
    ]
    if spec.stored_format is None:
        yield from files
    else:
        yield QuantizedFiles(
            *(folder, files, spec.stored_format),
            has_transposed_weights=spec.names.has_transposed_weights,
        )
