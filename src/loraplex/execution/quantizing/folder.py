"""A model folder with quantised linear layers, in compressed-tensors' format pack-quantized.

Tensors that are not quantised keep their names and types. One tensor is in memory at a time.
"""

import contextlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from tqdm import tqdm

from loraplex.adapters.durable_files import make_folder, sync_folder
from loraplex.core.errors import ConfigError
from loraplex.execution.quantizing.report import LayerError, QuantizeReport
from loraplex.execution.quantizing.rounding import IntegerForm, WeightError, quantize_weight
from loraplex.execution.quantizing.shards import ShardWriter
from loraplex.execution.weights.checkpoint import Checkpoint, open_files
from loraplex.execution.weights.quantized import compressed_tensors
from loraplex.execution.weights.weight_files import text_files, weight_files
from loraplex.models.engine_folder import CONFIG_NAME, is_foreign_checkpoint, model_fields
from loraplex.models.linear_group import LinearGroup
from loraplex.models.spec import LAYER_INPUTS, ROUTER, SHARED_GATE, ModelSpec

_KEPT: Final = (ROUTER, SHARED_GATE, LAYER_INPUTS)
"""Groups that stay as they are: their outputs choose and weigh experts, or reach all layers."""
_ENDS: Final = (".weight_packed", ".weight_scale", ".weight_shape")


class Moments(Protocol):
    """What the linear layers of a model read when it computes texts."""

    def moments(self, layer: int) -> Mapping[str, torch.Tensor]:
        """Return X^T X [in, in] of the inputs X of a layer's groups (LayerSpec.linears).

        Called for the layers in their order, once for each.
        """
        ...

    def proceed(self, layer: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Note the weights [out, in] by full name that the layer has from now on."""
        ...


class NoInputs:
    """Implements `Moments` where no text was given."""

    def moments(self, layer: int) -> Mapping[str, torch.Tensor]:  # noqa: ARG002
        return {}

    def proceed(self, layer: int, weights: Mapping[str, torch.Tensor]) -> None:
        pass


def check_source(source: Path, spec: ModelSpec) -> None:
    """Raise ConfigError for a folder whose weights cannot be quantised into another."""
    if spec.stored_format is not None:
        raise ConfigError(
            f"{source}: its weights are quantised already ({spec.stored_format.method}); quantise "
            "the model that they were made from"
        )
    if is_foreign_checkpoint(source):
        raise ConfigError(
            f"{source} is a checkpoint of TensorRT-LLM; quantise the Hugging Face folder that it "
            "was made from"
        )
    weight_files(source)


def quantize_folder(
    source: Path,
    output: Path,
    spec: ModelSpec,
    form: IntegerForm,
    inputs: Moments,
    max_shard_bytes: int,
) -> QuantizeReport:
    """Write `output`, which is complete or absent. spec: stored_head.read_model of the source.

    Raises ConfigError: for a source that check_source refuses, an output that holds files, and
    what cannot be read or written.
    """
    check_source(source, spec)
    with _new_folder(output) as folder, Checkpoint(source, spec) as checkpoint:
        job = _Job(source, folder, spec, form, checkpoint, max_shard_bytes)
        report = job.run(inputs)
        for file in text_files(source):
            target = folder / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        values = dict(model_fields(source).values_and_nulls)
        values["quantization_config"] = job.description()
        (folder / CONFIG_NAME).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return report


class _Job:
    def __init__(
        self,
        source: Path,
        folder: Path,
        spec: ModelSpec,
        form: IntegerForm,
        checkpoint: Checkpoint,
        max_shard_bytes: int,
    ) -> None:
        self._source = source
        self._spec = spec
        self._form = form
        self._checkpoint = checkpoint
        self._parts = {
            f"{module}.weight": module
            for layer in spec.layers
            for group in _quantised_groups(layer.linears).values()
            for path in group.paths
            for module in _modules(path, group)
        }
        """Modules by the full names of their weights."""
        self._own_names: dict[str, str] = {}
        self._ignored = {spec.names.lm_head: None}
        self._sizes: dict[str, int | None] = {}
        """Group size by module's own name."""
        names = self._names_in_files()
        modules = (self._module(weight) for weight in self._parts)
        written = (module + end for module in modules for end in _ENDS)
        self._writer = ShardWriter(folder, [*names, *written], max_shard_bytes)
        self._bar = tqdm(total=len(checkpoint), desc="Quantising", unit="tensor", disable=None)

    def run(self, inputs: Moments) -> QuantizeReport:
        rows: list[LayerError] = []
        with contextlib.closing(self._writer), self._bar:
            self._copy_others()
            for index, layer in enumerate(self._spec.layers):
                moments, decoded = inputs.moments(index), dict[str, torch.Tensor]()
                for name, group in _quantised_groups(layer.linears).items():
                    for path in group.paths:
                        rows.append(self._quantize(path, group, moments.get(name), decoded))
                inputs.proceed(index, decoded)
            self._writer.finish()
        num_bytes = sum(file.stat().st_size for file in weight_files(self._source))
        return QuantizeReport(rows, num_bytes, self._writer.num_bytes)

    def description(self) -> dict[str, Any]:
        """Return the quantization_config of what was written.

        Group sizes other than the most frequent one have a group that lists its modules; other
        servers fuse layers, and recognise those of the group for the class Linear only.
        """
        (most, _), *others = Counter(self._sizes.values()).most_common()
        groups = {}
        # The class comes last: programs take the first target that fits.
        for number, size in enumerate([*(size for size, _ in others), most]):
            own = [module for module, other in self._sizes.items() if other == size]
            targets = ["Linear"] if size == most else own
            groups[f"group_{number}"] = compressed_tensors.describe_group(
                targets, self._form.bits, size
            )
        return compressed_tensors.describe(groups, list(self._ignored))

    def _names_in_files(self) -> Sequence[str]:
        names: list[str] = []
        with contextlib.ExitStack() as stack:
            for file in open_files(self._source, self._spec):
                for name in stack.enter_context(file).names:
                    names.append(name)
                    full_name = self._spec.names.canonical(name)
                    if full_name is not None:
                        self._own_names[full_name] = name
        return names

    def _module(self, weight: str) -> str:
        """Return the name of a module as the files have it; one of stacked experts is in none."""
        return self._own_names.get(weight, weight).removesuffix(".weight")

    def _copy_others(self) -> None:
        stacked = self._checkpoint.stacked_names(self._parts)
        for file in open_files(self._source, self._spec):
            with file:
                for name in file.names:
                    full_name = self._spec.names.canonical(name)
                    if full_name in self._parts or name in stacked:
                        continue
                    tensor = file.tensor(name)
                    if not isinstance(tensor, torch.Tensor):
                        raise ConfigError(f"{file.path}: {name} is {type(tensor).__name__}")
                    self._note_ignored(name, full_name, tensor)
                    self._writer.write(name, tensor)
                    self._bar.update()

    def _note_ignored(self, name: str, full_name: str | None, tensor: torch.Tensor) -> None:
        """Note a module that may be linear elsewhere, and is not quantised."""
        if not name.endswith(".weight") or tensor.dim() < 2:
            return
        names = self._spec.names
        roots = (names.root, *names.other_roots, "")
        is_of_layer = name.startswith(tuple(f"{root}{names.layers}." for root in roots))
        if full_name is None and not is_of_layer:
            # Parts of a wrapper have other prefixes in other programs.
            self._ignored[f"re:.*{name.removeprefix('model.').split('.')[0]}\\..*"] = None
        elif full_name not in (f"{names.root}{names.embedding}.weight",):
            self._ignored[(full_name or name).removesuffix(".weight")] = None

    def _quantize(
        self,
        path: str,
        group: LinearGroup,
        moments: torch.Tensor | None,
        decoded: dict[str, torch.Tensor],
    ) -> LayerError:
        """Write all experts' weights of a path, or the only one."""
        error, shape = WeightError(0.0, 0.0), (0, 0)
        size = self._form.size_for(group.in_features)
        for module in _modules(path, group):
            name = f"{module}.weight"
            stored_weight = self._checkpoint.read(name)
            weight = stored_weight.T if self._spec.names.has_transposed_weights else stored_weight
            if not bool(weight.isfinite().all()):
                raise ConfigError(f"{self._source}: {name} has numbers that are not finite")
            if weight.dtype is torch.float64:
                weight = weight.float()
            stored, own_error = quantize_weight(weight, self._form, moments)
            error, shape = error + own_error, (weight.shape[0], weight.shape[1])
            own_name = self._module(name)
            for end, tensor in compressed_tensors.encode(stored, weight.dtype).items():
                self._writer.write(own_name + end, tensor)
            self._sizes[own_name] = size
            if moments is not None:
                decoded[name] = stored.decoded()
            self._bar.update()
        return LayerError(path.replace("{expert}", "*"), shape, size, error)


def _quantised_groups(linears: Mapping[str, LinearGroup]) -> Mapping[str, LinearGroup]:
    return {name: group for name, group in linears.items() if name not in _KEPT}


def _modules(path: str, group: LinearGroup) -> Sequence[str]:
    """Return the full names of all experts' modules of a path, or of the only one."""
    return [path.format(expert=expert) for expert in range(group.num_experts or 1)]


@contextlib.contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """Yield a folder next to `output`, which takes that name at the end, or is removed."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} is there already: give a new or an empty folder")
    try:
        make_folder(output.parent)
        folder = output.parent / f".{output.name}.{os.getpid()}.partial"
        folder.mkdir()
        try:
            yield folder
            folder.rename(output)
            sync_folder(output.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}") from error
