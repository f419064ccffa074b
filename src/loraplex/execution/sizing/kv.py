"""Number of blocks of each cache group, and windows of layers, by the settings and the model.

The first group, that with the largest window, gets as many blocks as fit. A group with a smaller
window gets as many, but not more than max_num_seqs sequences need at once. A group of an encoder's
positions gets its blocks for as many sequences of the greatest lengths as the first group. States,
of which a sequence has few at any length, get what max_num_seqs sequences and the prefix cache can
use, but at most half of the bytes that one sequence of max_model_len leaves.
"""

import bisect
import dataclasses
import math

import torch

from loraplex.core.byte_sizes import enough_bytes, readable_bytes
from loraplex.core.cache import Blocks, CachedVectors, States
from loraplex.core.errors import ConfigError
from loraplex.core.plan import CacheGroupCapacity
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.memory.cache_policy import cache_policy
from loraplex.models.cache_groups import (
    LayerGroup,
    attention_chunks,
    cache_groups,
    storage_bytes,
    with_attention_windows,
)
from loraplex.models.latent_config import limited_to
from loraplex.models.spec import ModelSpec

_DEFAULT_KV_BYTES = 2 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class KVSize:
    max_model_len: int
    groups: tuple[LayerGroup, ...]
    capacities: tuple[CacheGroupCapacity, ...]
    """Number of blocks of each group."""
    num_bytes: int
    """Bytes on the device."""
    longest_encoder_input: int
    """Capacity.longest_encoder_input"""


def windowed(settings: RunnerSettings, spec: ModelSpec) -> ModelSpec:
    """Return the model with the operator's windows, and as long as the device allows.

    Raises ConfigError.
    """
    windows, num_sinks = settings.max_attention_window_size, settings.sink_token_length
    if any(window < 1 for window in windows):
        raise ConfigError(
            f"max_attention_window_size must be at least 1 in every layer, got {windows}",
            param="max_attention_window_size",
        )
    if len(windows) > spec.num_layers:
        raise ConfigError(
            f"max_attention_window_size has {len(windows)} entries, the model {spec.num_layers} "
            "layers",
            param="max_attention_window_size",
        )
    spec = with_attention_windows(spec, windows, num_sinks)
    chunks = attention_chunks(spec)
    if chunks and settings.device != "cpu":
        # Rows are cut on the host (rows_in_chunks), which steps on a GPU do not wait for.
        spec = limited_to(
            spec, min(chunks), "on a GPU attention in several chunks is not supported"
        )
    caches = (cache for layer in spec.layers for each in layer.mixers for cache in each.caches())
    if num_sinks and all(cache.spec.reach is None for cache in caches):
        raise ConfigError(
            f"sink_token_length {num_sinks} needs a window: set max_attention_window_size, too",
            param="sink_token_length",
        )
    return spec


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block of each cache in all layers. dtype: of the KV cache."""
    return sum(
        storage_bytes(cache.storage, block_size, dtype)
        for layer in spec.layers
        for mixer in layer.mixers
        for cache in mixer.caches()
    )


def size_kv(settings: RunnerSettings, spec: ModelSpec, dtype: torch.dtype) -> KVSize:
    """dtype: of the KV cache. Raises ConfigError if one sequence of max_model_len does not fit.

    Without settings.max_model_len the length becomes what fits.
    """
    max_model_len = wanted_model_len(settings, spec)
    while True:
        needs = _GroupNeeds.of(settings, spec, dtype, max_model_len)
        num_blocks = _num_blocks(settings, needs)
        if num_blocks >= needs.per_sequence:
            return needs.size(num_blocks, _num_host_blocks(settings, needs))
        if settings.max_model_len is not None or num_blocks == 0:
            raise _too_small(settings, needs, num_blocks)
        # Shorter sequences may outgrow fewer windows, so the groups may change.
        max_model_len = num_blocks * settings.block_size


def _is_of_latent(group: LayerGroup) -> bool:
    """Whether it keeps vectors that are no pair of keys and values."""
    return len(group.storage) == 1 and isinstance(group.storage[0], CachedVectors)


@dataclasses.dataclass(frozen=True, slots=True)
class _GroupNeeds:
    """The cache groups, and what max_num_seqs sequences of max_model_len need of them."""

    max_model_len: int
    groups: tuple[LayerGroup, ...]
    block_bytes: tuple[int, ...]
    """Bytes of a block of each group in all its layers."""
    held: tuple[int, ...]
    """Maximum number of blocks of each group that one sequence needs at once."""
    useful: tuple[int, ...]
    """Number of blocks of each group beyond which max_num_seqs sequences cannot use more."""
    are_of_encoder: tuple[bool, ...]
    """Whether the positions of each group are those of the encoder's input."""
    longest_encoder_input: int
    of_states: tuple[int, ...]
    """Groups of states."""
    checkpoint_blocks: int
    """Blocks of the first group from one checkpoint to the next; 0: there are no checkpoints."""

    @classmethod
    def of(
        cls, settings: RunnerSettings, spec: ModelSpec, dtype: torch.dtype, max_model_len: int
    ) -> "_GroupNeeds":
        groups = cache_groups(spec, max_model_len)
        for every in (group.spec.every for group in groups if isinstance(group.spec, States)):
            if every % settings.block_size:
                raise ConfigError(
                    f"block_size must divide {every}, the tokens between the model's states, got "
                    f"{settings.block_size}",
                    param="block_size",
                )
        if dtype is torch.int8 and any(map(_is_of_latent, groups)):
            raise ConfigError(
                "kv_dtype int8 is not supported for latent attention: its cache is small already",
                param="kv_dtype",
            )
        policies = [cache_policy(group.spec, settings.block_size) for group in groups]
        longest_input = longest_encoder_input(settings, spec)
        held = tuple(
            policy.max_held(
                longest_input if policy.is_of_encoder else max_model_len,
                settings.max_num_batched_tokens,
            )
            for policy in policies
        )
        return cls(
            max_model_len,
            groups,
            tuple(
                len(group.layers) * storage_bytes(group.storage, settings.block_size, dtype)
                for group in groups
            ),
            held,
            tuple(settings.max_num_seqs * count for count in held),
            tuple(policy.is_of_encoder for policy in policies),
            longest_input,
            tuple(n for n, group in enumerate(groups) if isinstance(group.spec, States)),
            settings.state_checkpoint_tokens // settings.block_size
            if settings.enable_prefix_cache and isinstance(groups[0].spec, Blocks)
            else 0,
        )

    @property
    def per_sequence(self) -> int:
        """Number of blocks of the largest group without which no sequence of max_model_len fits."""
        pairs = zip(self.held, self.are_of_encoder, strict=True)
        return max(count for count, is_of_encoder in pairs if not is_of_encoder)

    def counts(self, num_blocks: int) -> tuple[int, ...]:
        """Return the number of blocks of each group, if the first one has num_blocks."""
        counts = [
            num_blocks,
            *(self._num_blocks(group, num_blocks) for group in range(1, len(self.groups))),
        ]
        if num_blocks:
            for group in self.of_states:
                counts[group] = self._num_states(group, num_blocks)
        return tuple(counts)

    def _num_blocks(self, group: int, num_blocks: int) -> int:
        """Return the number of blocks of a later group of positions."""
        if self.are_of_encoder[group]:
            # As many sequences as fit in the first group, if all are as long as they may be.
            num_blocks = -(-num_blocks * self.held[group] // self.held[0])
        return min(num_blocks, self.useful[group])

    def _num_states(self, group: int, num_blocks: int) -> int:
        """Return the number of states of a group.

        It has those of one sequence. The bytes of more of them are limited by those of the blocks
        of positions beyond one sequence, their number by what max_num_seqs sequences and the prefix
        cache can use. A sequence counts with the most that it ever holds, three states, since
        `guaranteed_no_evict` reserves as many; while it decodes it has one, or two after a border.
        Others may be checkpoints until then.
        """
        held = self.held[group]
        if not isinstance(self.groups[0].spec, Blocks):
            # No group grows with the length: each sequence takes as much of all of them.
            return min(self.useful[group], max(held, num_blocks * held // self.held[0]))
        size = sum(self.block_bytes[each] for each in self.of_states)
        spare = self._position_bytes(num_blocks) - self._position_bytes(self.per_sequence)
        checkpoints = num_blocks // self.checkpoint_blocks if self.checkpoint_blocks else 0
        affordable = held + max(0, spare) // max(1, size)
        return min(affordable, self.useful[group] + checkpoints)

    def _position_bytes(self, num_blocks: int) -> int:
        """Return the bytes of the groups without states, if the first one has num_blocks."""
        return sum(
            (self._num_blocks(group, num_blocks) if group else num_blocks) * size
            for group, size in enumerate(self.block_bytes)
            if group not in self.of_states
        )

    def num_bytes(self, num_blocks: int) -> int:
        """Return the bytes of `counts`."""
        pairs = zip(self.counts(num_blocks), self.block_bytes, strict=True)
        return sum(count * size for count, size in pairs)

    def largest(self, num_bytes: int) -> int:
        """Return the greatest number of blocks of the first group whose num_bytes fits."""
        size = self.block_bytes[0]
        # A stage of a pipeline may have no layers of the first group.
        most = num_bytes // size if size else max(self.useful)
        if not isinstance(self.groups[0].spec, Blocks):  # the prefix cache keeps nothing
            most = min(most, self.useful[0])
        return bisect.bisect_right(range(most + 1), num_bytes, key=self.num_bytes) - 1

    def size(self, num_blocks: int, num_host_blocks: int) -> KVSize:
        counts = zip(
            self.counts(num_blocks), self.counts(num_host_blocks), self.block_bytes, strict=True
        )
        capacities = tuple(
            CacheGroupCapacity(
                spec=group.spec,
                num_blocks=count,
                num_host_blocks=host_count,
                block_bytes=num_bytes,
            )
            for group, (count, host_count, num_bytes) in zip(self.groups, counts, strict=True)
        )
        num_bytes = self.num_bytes(num_blocks)
        return KVSize(
            self.max_model_len, self.groups, capacities, num_bytes, self.longest_encoder_input
        )


def trial_kv_size(
    settings: RunnerSettings, spec: ModelSpec, dtype: torch.dtype, max_blocks: int
) -> KVSize:
    """Return a size for steps whose results have no meaning: at most max_blocks for each group."""
    max_model_len = wanted_model_len(settings, spec)
    num_blocks = min(max_blocks, -(-max_model_len // settings.block_size))
    return _GroupNeeds.of(settings, spec, dtype, max_model_len).size(num_blocks, 0)


def _too_small(settings: RunnerSettings, needs: _GroupNeeds, num_blocks: int) -> ConfigError:
    """Return the error, which names the setting to change and the size that is needed."""
    capped = _blocks_by_tokens(settings)
    if capped == num_blocks:
        param, enough = "max_tokens_in_paged_kv_cache", needs.per_sequence * settings.block_size
        needed = str(enough)
    else:
        param, needed = "kv_cache_bytes", enough_bytes(needs.num_bytes(needs.per_sequence))
    cache = needs.groups[0].spec
    smaller = "max_model_len" if cache.reach is None else "max_attention_window_size"
    seen = "" if cache.reach is None else f" with {cache.name} and what one step computes"
    return ConfigError(
        f"the KV cache holds {num_blocks * settings.block_size} tokens, max_model_len is "
        f"{needs.max_model_len}{seen}: set {param} to at least {needed}, or a smaller {smaller}"
        + _more_memory(settings, needs.num_bytes(needs.per_sequence)),
        param=param,
    )


def _more_memory(settings: RunnerSettings, needed: int) -> str:
    """needed: bytes of the KV cache for one sequence."""
    if settings.memory_bytes is None or settings.kv_cache_bytes is None:
        return ""
    missing = math.ceil((needed - settings.kv_cache_bytes) / settings.kv_cache_fraction)
    return f", or raise --memory to {enough_bytes(settings.memory_bytes + missing)}"


def wanted_model_len(settings: RunnerSettings, spec: ModelSpec) -> int:
    """Return the length, if the KV cache holds it. Raises ConfigError if it exceeds the model's."""
    longest = spec.default_max_model_len
    wanted = settings.max_model_len or longest
    if wanted > longest:
        raise ConfigError(
            f"max_model_len {wanted} is more than the {longest} positions that the model has"
            + (f": {spec.length_reason}" if spec.length_reason else ""),
            param="max_model_len",
        )
    return wanted


def longest_encoder_input(settings: RunnerSettings, spec: ModelSpec) -> int:
    """Return the maximum number of tokens of an encoder's input; 0: there is no encoder.

    One step encodes an input and computes the first token that reads it.
    """
    if spec.encoder is None:
        return 0
    return min(spec.encoder.longest_input, max(1, settings.max_num_batched_tokens - 1))


def _num_blocks(settings: RunnerSettings, needs: _GroupNeeds) -> int:
    """Return the number of blocks of the first group; the others may have fewer."""
    by_bytes, capped = _blocks_by_bytes(settings, needs), _blocks_by_tokens(settings)
    return min(count for count in (by_bytes, capped) if count is not None)


def _blocks_by_bytes(settings: RunnerSettings, needs: _GroupNeeds) -> int | None:
    """Return the number of blocks; None: only max_tokens_in_paged_kv_cache limits it."""
    if settings.num_blocks is not None:
        return settings.num_blocks
    if settings.kv_cache_bytes is not None:
        return needs.largest(settings.kv_cache_bytes)
    if settings.max_tokens_in_paged_kv_cache is not None:
        return None
    return min(needs.useful[0], needs.largest(_DEFAULT_KV_BYTES))


def _blocks_by_tokens(settings: RunnerSettings) -> int | None:
    if settings.max_tokens_in_paged_kv_cache is None:
        return None
    return -(-settings.max_tokens_in_paged_kv_cache // settings.block_size)


def _num_host_blocks(settings: RunnerSettings, needs: _GroupNeeds) -> int:
    """Return the number of host blocks of the first group; the others may have fewer."""
    num_bytes, per_block = settings.kv_cache_host_memory_bytes, needs.num_bytes(1)
    if 0 < num_bytes < per_block:
        raise ConfigError(
            f"kv_cache_host_memory_bytes {readable_bytes(num_bytes)} does not hold one block: set "
            f"at least {enough_bytes(per_block)}, or 0 for none",
            param="kv_cache_host_memory_bytes",
        )
    # A stage without caches could hold any number of blocks in no bytes.
    return needs.largest(num_bytes) if num_bytes else 0
