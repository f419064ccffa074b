"""Warnings about what adapter_config.json targets and the tensors lack.

PEFT saves what it trained, which may be less than target_modules names: where the experts are one
parameter, up_proj may reach the shared expert alone. So the tensors decide what an adapter changes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from loraplex.adapters.canonical import CanonicalRow, RowKind
from loraplex.adapters.formats.peft_config import CONFIG_NAME, PeftConfig
from loraplex.adapters.formats.peft_names import CLASSIFIERS
from loraplex.adapters.shapes import BaseShapes, other_layout
from loraplex.core.adapter import SCORE
from loraplex.core.byte_sizes import readable_bytes

_MAX_SHOWN = 20


def target_warnings(
    config: PeftConfig, rows: Sequence[CanonicalRow], shapes: BaseShapes
) -> list[str]:
    """Return what the config targets and the rows lack. shapes: of the base model."""
    lora = [row for row in rows if row.kind is RowKind.LORA]
    warnings = []
    if config.target_modules is None and not config.target_parameters:
        warnings.append(
            f"{CONFIG_NAME} has no target_modules: the modules of the tensors are applied"
        )
    heads = [name for name in config.modules_to_save if name in CLASSIFIERS]
    if heads and not any(row.module == SCORE for row in rows):
        warnings.append(
            f"modules_to_save names {' and '.join(heads)}, but there is no tensor of a "
            "classification head: the adapter classifies with the base model's, if that has one"
        )
    missing = _missing_modules(config, lora)
    if missing:
        names = ", ".join(missing)
        warnings.append(f"target_modules names {names}, but there are no such tensors")
    missing = [name for name in config.target_parameters if not _has_parameter(name, lora)]
    if missing:
        names = ", ".join(missing)
        warnings.append(
            f"target_parameters names {names}, but there are no such tensors, or their lora_B is "
            "zero"
        )
    for module, layers in _missing_layers(config, lora, shapes).items():
        listed = ", ".join(map(str, layers[:_MAX_SHOWN]))
        more = f" and {len(layers) - _MAX_SHOWN} more" if len(layers) > _MAX_SHOWN else ""
        warnings.append(
            f"{module} is targeted, but there is neither lora_A nor lora_B of it in layers "
            f"{listed}{more}: there the base model's own weights are used"
        )
    return warnings + _expert_warnings(config, lora, shapes)


def _expert_warnings(
    config: PeftConfig, rows: Sequence[CanonicalRow], shapes: BaseShapes
) -> list[str]:
    """Return the experts that have no LoRA, and the bytes of factors that several share."""
    warnings = []
    counts = Counter(row.module for row in rows if row.expert is not None)
    layers = {module: {row.layer for row in rows if row.module == module} for module in counts}
    for module in shapes.num_experts:
        total = sum(
            shapes.layer(layer).num_experts.get(module, 0)
            for layer in layers.get(module, ())
            if layer is not None
        )
        if 0 < counts[module] < total:
            warnings.append(
                f"only {counts[module]} of {total} experts have LoRA of {module}: the others have "
                "no tensors or a lora_B of zeros, and use the base model's own weights"
            )
    bare = [
        module
        for module in shapes.num_experts
        if not counts[module] and _targets_experts(config, module, shapes)
    ]
    if bare:
        warnings.append(
            f"{', '.join(bare)} of routed experts are targeted, but there are no tensors of them, "
            "or their lora_B is zero: the routed experts use the base model's own weights"
        )
    repeated = _repeated_bytes(rows)
    if repeated:
        total = sum(row.num_bytes for row in rows)
        warnings.append(
            f"experts share a lora_A or lora_B, which is repeated for each of them: it takes "
            f"{readable_bytes(repeated)} of the adapter's {readable_bytes(total)}"
        )
    return warnings


def _targets_experts(config: PeftConfig, module: str, shapes: BaseShapes) -> bool:
    layer = shapes.module_layers.get(module, (0,))[0]
    path = shapes.layer(layer).paths.get(module)
    if path is None or config.target_modules is None:
        return False
    return config.targets(path.format(layer, expert=0))


def _repeated_bytes(rows: Iterable[CanonicalRow]) -> int:
    """Return the bytes of factors that are those of the expert before."""
    last: dict[tuple[int | None, str], CanonicalRow] = {}
    repeated = 0
    for row in rows:
        if row.expert is None:
            continue
        before = last.get((row.layer, row.module))
        last[row.layer, row.module] = row
        if before is not None:
            repeated += sum(
                tensor.num_bytes
                for name, tensor in row.tensors.items()
                if tensor.equals(before.tensors[name])
            )
    return repeated


def _missing_layers(
    config: PeftConfig, rows: Iterable[CanonicalRow], shapes: BaseShapes
) -> Mapping[str, list[int]]:
    """Return the layers, by module, that the config targets and that have no LoRA of it."""
    paths: dict[str, str] = {}
    present: dict[str, set[int]] = {}
    for row in rows:
        if row.layer is not None:
            if row.module not in paths:
                paths[row.module] = row.origin.replace(f".{row.layer}.", ".{}.", 1)
            present.setdefault(row.module, set()).add(row.layer)
    missing = {
        module: [
            layer
            for layer in shapes.module_layers.get(module, range(shapes.num_layers))
            if layer not in present[module] and config.targets(path.replace("{}", str(layer), 1))
        ]
        for module, path in paths.items()
    }
    return {module: layers for module, layers in missing.items() if layers}


def _missing_modules(config: PeftConfig, rows: Iterable[CanonicalRow]) -> list[str]:
    """Return entries of target_modules that match no tensor and no exclusion."""
    if not isinstance(config.target_modules, list):
        return []
    paths = {path: None for row in rows for path in _paths_of(row)}
    missing = [name for name in config.target_modules if not _matches(paths, name)]
    return [name for name in missing if not any(map(config.excludes, _paths(name)))]


def _paths_of(row: CanonicalRow) -> Iterable[str]:
    """Return the paths that an entry of target_modules may mean by a row."""
    if row.origin.endswith(row.module):
        root = row.origin.removesuffix(row.module)
        return [root + name for name in (row.module, *other_layout(row.module))]
    # The name of the file stands for the module: of an expert, or of all experts.
    root = row.origin.rpartition(".")[0]
    return [row.origin, root, f"{root}.{row.module.rpartition('.')[2]}"]


def _has_parameter(name: str, rows: Iterable[CanonicalRow]) -> bool:
    paths = {path for row in rows for path in (row.origin, f"{row.origin}.weight")}
    return _matches(paths, name)


def _paths(name: str) -> tuple[str, ...]:
    """Return paths of modules that an entry of target_modules may mean, to test patterns."""
    parents = ("self_attn", "mlp", "linear_attn", "mamba", "mixer", "conv")
    return (name, *(f"model.layers.0.{parent}.{name}" for parent in parents))


def _matches(paths: Iterable[str], name: str) -> bool:
    return any(path == name or path.endswith(f".{name}") for path in paths)
