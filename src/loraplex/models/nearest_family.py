"""Which served family an architecture that is not served is nearest to, and what differs.

For an error that a user can report as it is: fields of config.json that the family does not read,
and tensors that only one of the two has. Free of torch.
"""

import contextlib
import dataclasses
import difflib
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from loraplex.core.errors import LoraplexError, UnsupportedModelError
from loraplex.models.config_fields import ConfigFields, read_fields
from loraplex.models.decoder_names import ExpertNames
from loraplex.models.spec import LayerSpec, ModelSpec
from loraplex.models.specs.part import NormSpec

_INDEX: Final = "model.safetensors.index.json"
_MAX_SHOWN: Final = 8
"""Maximum number of fields, and of tensors of each kind, in a text."""
_WITHOUT_EFFECT: Final = re.compile(
    r"_.*|architectures|auto_map|model_type|transformers_version|(torch_)?dtype|use_cache"
    r"|cache_implementation|quantization_config|pretraining_tp|initializer_.*|.*dropout.*|.*pdrop"
    r"|.*aux_loss.*|.*jitter.*|output_(attentions|hidden_states|router_logits)|.*token_(id|index)|(vision|audio)_config|gradient_.*"
)
"""Fields that change no result of a decoder, or that are read for all families alike."""
_NUMBER: Final = re.compile(r"(?<=\.)(?:\d+|\{expert\})(?=\.)")
_QUANTISED_WEIGHT: Final = re.compile(r"\.(?:qweight|weight_packed)$")
_OF_QUANTISATION: Final = re.compile(
    r".*\.(?:qzeros|scales|g_idx|input_scale|weight_(?:scale\w*|shape|zero_point|g_idx))"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """A family as a reading of the folder."""

    architecture: str
    refusal: str = ""
    """Why it does not read config.json at all; empty: it does."""
    lacks_field: bool = False
    """Whether that is because a field is missing or malformed, and not a value."""
    unread_fields: Sequence[str] = ()
    """Fields of the file that it does not read, or not before it refuses one."""
    num_absent_fields: int = 0
    """Number of fields that it looks for and the file does not have."""
    missing_tensors: Sequence[str] = ()
    """Tensors of the family that the folder lacks, with * for numbers."""
    unknown_tensors: Sequence[str] = ()
    """Tensors of the folder that the family does not have, with * for numbers."""

    @property
    def num_tensors(self) -> int:
        """Number of tensors that differ."""
        return len(self.missing_tensors) + len(self.unknown_tensors)

    def differences(self) -> Iterator[str]:
        if self.refusal:
            yield f"refuses it ({self.refusal})"
            return
        for what, names in (
            ("does not read", self.unread_fields),
            ("does not know the tensors", self.unknown_tensors),
            ("needs the tensors", self.missing_tensors),
        ):
            if names:
                shown = ", ".join(itertools.islice(names, _MAX_SHOWN))
                more = len(names) - _MAX_SHOWN
                yield f"{what} {shown}" + (f" and {more} more" if more > 0 else "")


def nearest_family(
    folder: Path,
    architecture: str,
    fields: ConfigFields,
    families: Mapping[str, Callable[[ConfigFields], ModelSpec]],
) -> str:
    """Return a text for an error: "nearest is X, which does not read y".

    fields: config.json of the folder, whose architecture is none of the families.
    """
    stored = _stored_tensors(folder)
    readings = [_read(name, read, fields, stored) for name, read in families.items()]
    nearest = _nearest(readings, architecture)
    found = "; ".join(nearest.differences())
    if found:
        return f"nearest is {nearest.architecture}, which {found}"
    what = "no field and no tensor" if stored else "no field"
    return f"nearest is {nearest.architecture}, from which {what} differs"


def _nearest(readings: Sequence[_Family], architecture: str) -> _Family:
    """Return the one with the fewest differences.

    The tensors of a family that refuses a value are unknown, so the fewest of all count. Its unread
    fields include those that it reads later.
    """
    fewest = min((family.num_tensors for family in readings if not family.refusal), default=0)

    def distance(family: _Family) -> tuple[float, ...]:
        number = len(family.unread_fields) + (fewest if family.refusal else family.num_tensors)
        names = difflib.SequenceMatcher(None, family.architecture, architecture)
        return family.lacks_field, number, family.num_absent_fields, -names.ratio()

    return min(readings, key=distance)


def _read(
    name: str,
    read: Callable[[ConfigFields], ModelSpec],
    fields: ConfigFields,
    stored: Collection[str],
) -> _Family:
    own = ConfigFields(fields.values_and_nulls, fields.source)
    refusal, lacks_field = "", False
    missing: Sequence[str] = ()
    unknown: Sequence[str] = ()
    try:
        spec = read(own)
        if stored:
            missing, unknown = _tensor_differences(spec, stored)
    except LoraplexError as error:
        refusal = str(error).removeprefix(f"{fields.source}: ")
        lacks_field = not isinstance(error, UnsupportedModelError)
    stated = {*fields, *(fields.table("text_config") or ())}
    unread = [field for field in stated - own.reads if not _WITHOUT_EFFECT.fullmatch(field)]
    return _Family(
        architecture=name,
        refusal=refusal,
        lacks_field=lacks_field,
        unread_fields=sorted(unread),
        num_absent_fields=len(own.reads - stated),
        missing_tensors=missing,
        unknown_tensors=unknown,
    )


def _stored_tensors(folder: Path) -> Collection[str]:
    """Return one name of each kind that differs in numbers alone; empty if no file has names."""
    names: Collection[str] = ()
    with contextlib.suppress(LoraplexError, OSError):
        index = folder / _INDEX
        if index.is_file():
            names = tuple(read_fields(index).table("weight_map") or ())
        else:
            from loraplex.adapters.tensor_file import tensor_names  # noqa: PLC0415 - slow import

            files = sorted(folder.glob("*.safetensors"))
            names = tuple(itertools.chain.from_iterable(map(tensor_names, files)))
    weights = (
        _QUANTISED_WEIGHT.sub(".weight", name)
        for name in names
        if not _OF_QUANTISATION.fullmatch(name)
    )
    return tuple({_pattern(name): name for name in weights}.values())


def _tensor_differences(
    spec: ModelSpec, stored: Collection[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Return patterns of tensors that are missing, and of those that are unknown."""
    own = set(map(_pattern, _own_tensors(spec)))
    canonical = (spec.names.canonical(name) for name in stored)
    found = {_pattern(name) for name in canonical if name is not None}
    found = set(itertools.chain.from_iterable(_parts(name, spec.names.experts) for name in found))
    unknown = found - own
    if spec.tie_word_embeddings:
        unknown.discard(f"{spec.names.lm_head}.weight")
    return sorted(own - found), sorted(unknown)


def _parts(pattern: str, names: ExpertNames) -> Iterator[str]:
    """Yield the tensors of an expert that a tensor of all experts has; of others, itself."""
    for form in names.stacked_forms:
        prefix, is_form, _ = pattern.removesuffix(".weight").rpartition(
            form.tensor.removesuffix(".weight")
        )
        if is_form and prefix.endswith(".*."):
            yield from (_pattern(prefix + part) for part in form.parts)
            return
    yield pattern


def _own_tensors(spec: ModelSpec) -> Iterator[str]:
    """Yield the names of a model's tensors, with {expert} for numbers of experts."""
    names = spec.names
    yield f"{names.root}{names.embedding}.weight"
    if spec.has_position_table:
        yield f"{names.root}{names.positions}.weight"
    if spec.embedding_size is not None:
        yield from (f"{names.root}{name}.weight" for name in names.embedding_projections)
    if not spec.tie_word_embeddings:
        yield f"{names.lm_head}.weight"
    if spec.has_lm_head_bias:
        yield f"{names.lm_head}.bias"
    encoder = spec.encoder
    layers, norms = spec.layers, [spec.embedding_norm, spec.final_norm]
    if encoder is not None:
        layers += encoder.layers
        norms += [encoder.embedding_norm, encoder.final_norm]
        if encoder.positions:
            yield f"{encoder.positions}.weight"
    yield from itertools.chain.from_iterable(map(_of_norm, norms))
    yield from itertools.chain.from_iterable(map(_tensors_of_layer, layers))


def _tensors_of_layer(layer: LayerSpec) -> Iterator[str]:
    for norm in layer.norms.values():
        yield from _of_norm(norm)
    for tensor in itertools.chain.from_iterable(m.tensors().values() for m in layer.mixers):
        if isinstance(tensor, NormSpec):
            yield from _of_norm(tensor)
        else:
            yield tensor.name
    for group in layer.linears.values():
        kinds = ("weight", "bias") if group.has_bias else ("weight",)
        yield from (f"{path}.{kind}" for path in group.paths for kind in kinds)
    feed_forward, others = layer.feed_forward, [layer.output_factor]
    if feed_forward is not None:
        others += [feed_forward.selection_bias, feed_forward.expert_factors]
        if feed_forward.xielu:
            others += [f"{feed_forward.xielu}.alpha_p", f"{feed_forward.xielu}.alpha_n"]
    yield from filter(None, others)


def _of_norm(norm: NormSpec | None) -> Iterator[str]:
    if norm is not None:
        yield f"{norm.path}.{norm.weight_name}"
        if norm.has_bias:
            yield f"{norm.path}.bias"


def _pattern(name: str) -> str:
    """Return the name with * for each number."""
    return _NUMBER.sub("*", name)
