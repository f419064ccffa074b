"""All that serving holds for one base model."""

import asyncio
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from loraplex.adapters.base_check import check_targets
from loraplex.adapters.formats.peft_ends import EndTokens
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.staged import StagedAdapter
from loraplex.adapters.store import AdapterStore, AdapterVersion
from loraplex.core.adapter import AdapterChoice, AdapterSource, Residency
from loraplex.core.byte_sizes import enough_bytes, readable_bytes
from loraplex.core.config import ModelConfig
from loraplex.core.errors import (
    AdapterTooLargeError,
    LoraplexError,
    NotReadyError,
    PermissionDeniedError,
    UnsupportedFeatureError,
)
from loraplex.core.plan import Capacity
from loraplex.core.principal import ALL, DEFAULT_TENANT, LOCAL, Principal
from loraplex.core.request import GenerateRequest, TruncationSide
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import FairShare
from loraplex.core.stats import AdapterActivity, Durations, EngineStats, StepRecord
from loraplex.core.task import Generate, Pool, PoolKind
from loraplex.memory.adapter_pages import layer_targets, most_pages
from loraplex.serving.access.tenant_adapters import DiscoveredAdapters, LeftOut, TenantAdapters
from loraplex.serving.adapter_cards import AdapterState
from loraplex.serving.admission import cut_prompt, first_ids, without_padding
from loraplex.serving.engines.async_engine import AsyncEngine
from loraplex.serving.engines.engine_state import EngineEnd
from loraplex.serving.grammar.grammars import Grammars
from loraplex.serving.local_texts import INLINE_CHARACTERS, LocalTexts
from loraplex.serving.model_memory import ModelMemory, StoredAdapters, memory_of, stored
from loraplex.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_NONE_YET = Durations()
_MAX_ENDS: Final = 1024
"""End tokens of adapters whose ids are remembered."""


class KnownEnds(NamedTuple):
    """Ids of an adapter's end tokens, and those that the model does not have."""

    ids: tuple[int, ...]
    unknown: tuple[int | str, ...]


@dataclasses.dataclass(slots=True, eq=False)
class ServedModel(LocalTexts):
    eos_token_ids: tuple[int, ...]
    shapes: BaseShapes
    config: ModelConfig
    store: AdapterStore
    engine: AsyncEngine
    unfit: dict[str, LoraplexError] = dataclasses.field(default_factory=dict)
    """Why a stored adapter cannot be served, by digest."""
    discovered: DiscoveredAdapters = dataclasses.field(default_factory=DiscoveredAdapters)
    left_out: Sequence[LeftOut] = ()
    """Entries of its adapter folders that are not served."""
    grammars: Grammars = dataclasses.field(init=False)
    share_kind: FairShare = dataclasses.field(init=False)
    """What shares the capacity of its engine."""
    takes_adapters: bool = dataclasses.field(init=False)
    _stage_times: dict[str, Durations] = dataclasses.field(default_factory=dict)
    _known_ends: Callable[[EndTokens], KnownEnds] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        # Each request with an adapter needs the ids of its end tokens.
        find = functools.partial(_known_ends, self.tokenizer, self.card.vocab_size)
        self._known_ends = functools.lru_cache(_MAX_ENDS)(find)
        self.share_kind = self.config.share_kind
        self.takes_adapters = self.shapes.is_adaptable
        self.grammars = Grammars(self.tokenizer, self.config.grammar_limits)
        self.engine.on_capacity = self._set_capacity

    async def start(self) -> None:
        await self.engine.start()

    def _set_capacity(self, capacity: Capacity) -> None:
        """Admit requests up to the longest sequence that the memory of the present engine holds."""
        encoder = self.card.encoder
        if encoder is not None:
            encoder = msgspec.structs.replace(encoder, max_tokens=capacity.longest_encoder_input)
        self.card = msgspec.structs.replace(
            self.card,
            max_model_len=capacity.max_model_len,
            device_name=capacity.device_name,
            encoder=encoder,
        )

    async def in_tokens(self, request: GenerateRequest) -> tuple[GenerateRequest, Sequence[int]]:
        """Return a request whose texts are tokens, and the part of its prompt that it takes."""
        truncation, task = request.truncation, request.task
        token_ids: Sequence[int] = await self.prompt_ids(
            request.prompt, request.add_special_tokens, is_cut=truncation is not None
        )
        if isinstance(task, Generate) and (task.sampling.bad_words or task.sampling.grammar):
            work = functools.partial(with_bad_token_ids, task.sampling, self.tokenizer.encode)
            is_short = sum(map(len, task.sampling.bad_words)) <= INLINE_CHARACTERS
            sampling = work() if is_short else await asyncio.to_thread(work)
            task = Generate(await self.grammars.compiled(sampling))
            request = msgspec.structs.replace(request, task=task)
        if truncation is not None:
            kept, num_whole = self.kept_tokens(request), len(token_ids)
            token_ids = cut_prompt(request, truncation, token_ids, self.card, kept)
            if isinstance(task, Pool) and truncation.side is TruncationSide.LEFT:
                # The prefix is cut first; what the tokenizer puts before it stays.
                num_left_out = task.num_left_out - (num_whole - len(token_ids))
                num_left_out = max(min(kept[0], task.num_left_out), num_left_out)
                task = msgspec.structs.replace(task, num_left_out=num_left_out)
                request = msgspec.structs.replace(request, task=task)
        if isinstance(task, Pool) and task.kind is PoolKind.SCORE:
            token_ids = without_padding(token_ids, self.card.classes.pad_token_id)
        return request, token_ids

    async def ids_of_stacks(
        self, request: GenerateRequest, token_ids: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return the tokens of the decoder and of the encoder, which has those of a prompt.

        Raises InvalidParameterError, UnsupportedFeatureError.
        """
        given, encoder = request.decoder_prompt, self.card.encoder
        if encoder is None:
            if given is not None or request.forced_bos_token_id is not None:
                param = "forced_bos_token_id" if given is None else "decoder_prompt"
                raise UnsupportedFeatureError(
                    f"model {self.card.name!r} has no encoder, so it takes no {param}: its prompt "
                    "is what the output continues",
                    param=param,
                )
            return token_ids, ()
        if isinstance(given, str):
            given = tuple(await self.prompt_ids(given, add_special_tokens=False))
        return first_ids(encoder, given, request.forced_bos_token_id), token_ids

    def resolve(
        self, choices: tuple[AdapterChoice, ...], seen: TenantAdapters
    ) -> list[tuple[AdapterVersion, float]]:
        """The versions that a request will run with, from now to its end. seen: by its tenant."""
        if choices and not seen.principal.rights.use.patterns:
            principal = seen.principal
            raise PermissionDeniedError(
                f"tenant {principal.tenant!r} may not use adapters: "
                f"{principal.right_line('use', ALL)}"
            )
        if choices and not self.takes_adapters:
            raise UnsupportedFeatureError(
                f"LoRA is not enabled for this model: {self.card.name!r} is served without "
                "(enable_lora, or a build without lora_plugin)"
            )
        chosen = []
        for choice in choices:
            version = seen.resolve(choice.key)
            if version.digest in self.unfit:
                raise _cannot_be_served(version, self.unfit[version.digest])
            chosen.append((version, choice.scale))
        return chosen

    def with_prefix(
        self, request: GenerateRequest, chosen: Sequence[tuple[AdapterVersion, float]]
    ) -> GenerateRequest:
        """Return a request whose text has its prefix: of the first adapter with prompts, if any.

        Raises InvalidParameterError for a prompt that is not there.
        """
        own = (version.staged.prompts for version, _ in chosen)
        prompts = next((found for found in own if found is not None), self.card.vectors.prompts)
        return self.prefixed(request, prompts)

    def end_token_ids(self, chosen: Sequence[tuple[AdapterVersion, float]]) -> tuple[int, ...]:
        """Return the model's end tokens and those of a request's adapters.

        An `eos_token` in tokenizer_config replaces them all.
        """
        if self.config.tokenizer_config.get("eos_token") is not None:
            return self.eos_token_ids
        own = (
            self._known_ends(version.staged.end_tokens).ids for version, scale in chosen if scale
        )
        return tuple(dict.fromkeys(itertools.chain(self.eos_token_ids, *own)))

    def with_end_warnings(self, staged: StagedAdapter) -> StagedAdapter:
        """Return an adapter with a warning about each end token that the model lacks."""
        unknown = self._known_ends(staged.end_tokens).unknown
        warnings = (
            f"its end token {end!r} is none of the model's: outputs do not end there"
            for end in unknown
        )
        return msgspec.structs.replace(staged, warnings=(*staged.warnings, *warnings))

    def check_stored(self) -> None:
        """Find what was stored for another base of this name, or for larger limits."""
        self.unfit.clear()
        for version in self.store.present(self.card.name):
            try:
                self.check_fits(version)
            except LoraplexError as error:
                logger.warning("%s", _cannot_be_served(version, error).message)
                self.unfit[version.digest] = error

    def check_fits(self, version: AdapterVersion) -> None:
        """Raises AdapterMismatchError or AdapterTooLargeError."""
        check_targets(version.source.targets, self.shapes, self.config.rank_limits)
        check_fits_tiers(version.source, self.config, self.engine.capacity)

    def state_of(self, version: AdapterVersion) -> AdapterState:
        """Whether a request would be refused for it."""
        if (version.tenant, version.name) in self.discovered.by_name:
            return AdapterState.UNVALIDATED
        if version.digest in self.store.missing_digests:
            return AdapterState.MISSING
        return AdapterState.UNFIT if version.digest in self.unfit else AdapterState.READY

    def memory(self) -> ModelMemory:
        """What it takes, tier by tier. Raises NotReadyError before the engine was there."""
        if not self.engine.has_started:
            raise NotReadyError(self.problem, retry_after_seconds=2)
        return memory_of(
            self.engine.capacity,
            self.engine.stats,
            targets=layer_targets(
                self.shapes.of_layers(),
                num_experts=[
                    self.shapes.layer(layer).num_experts for layer in range(self.shapes.num_layers)
                ],
            ),
            model=self.config,
        )

    async def stored_adapters(self) -> StoredAdapters:
        """Return the number and size of canonical files of adapters that have a name."""
        versions = self.store.present(self.card.name)
        paths = [version.source.path for version in versions]
        return await asyncio.to_thread(stored, len(versions), paths)

    def adapter_names(self) -> Sequence[tuple[str, str]]:
        stored = [
            (version.name, version.digest)
            for version in self.store.present(self.card.name)
            if version.tenant == DEFAULT_TENANT
        ]
        return [*stored, *((one.name, "") for one in self.adapters_of(LOCAL).discovered())]

    async def adapter_residency(self) -> Mapping[str, Residency]:
        return await self.engine.residency()

    async def adapter_activity(self) -> AdapterActivity:
        return await self.engine.recent_activity()

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    @property
    def engine_restarts(self) -> Mapping[str, int]:
        return {end.value: self.engine.restarts[end] for end in EngineEnd}

    def steps(self, limit: int, after_ns: int | None = None) -> Sequence[StepRecord]:
        return select_steps(self.engine.steps, limit, after_ns)

    def observe_load(self, stage: str, seconds: float) -> None:
        """Count the time of one stage of loading an adapter."""
        times = self._stage_times.get(stage, _NONE_YET)
        self._stage_times[stage] = times.with_one(int(seconds * 1e9))

    def load_times(self) -> Mapping[str, Durations]:
        tiers = self.engine.stats.adapters
        return {**self._stage_times, "read": tiers.read_times, "copy": tiers.copy_times}

    def adapters_of(self, principal: Principal) -> TenantAdapters:
        """Return the adapters as a principal sees them."""
        return TenantAdapters(self.store, self.card.name, principal, self.discovered)

    @property
    def problem(self) -> str:
        """Reason why requests would fail now; empty if they would not."""
        if self.engine.is_ready:
            return ""
        failure: LoraplexError | None = self.engine.failure
        reason = failure.message if failure else self.engine.problem
        detail = f": {reason}" if reason else ""
        return f"the engine of model {self.card.name!r} is {self.engine.state}{detail}"


def check_fits_tiers(source: AdapterSource, config: ModelConfig, capacity: Capacity) -> None:
    """Raise AdapterTooLargeError for an adapter that would not fit even alone in a tier."""
    if source.num_bytes > config.lora_host_bytes:
        raise AdapterTooLargeError(
            f"the adapter takes {readable_bytes(source.num_bytes)}, and the host cache for "
            f"adapters has {readable_bytes(config.lora_host_bytes)}; raise lora_host_bytes to "
            f"{enough_bytes(source.num_bytes)} or more"
        )
    pages = most_pages(capacity.held(source.targets), capacity.page_geometry)
    if pages > capacity.num_adapter_pages:
        raise AdapterTooLargeError(
            f"the adapter needs {pages} pages of {readable_bytes(capacity.adapter_page_bytes)} on "
            f"the device, whose pool has {capacity.num_adapter_pages}; raise lora_device_bytes to "
            f"{enough_bytes(pages * capacity.adapter_page_bytes)} or more"
        )


def _known_ends(tokenizer: Tokenizer, vocab_size: int, ends: EndTokens) -> KnownEnds:
    """Find an adapter's end tokens among the model's. A text of several tokens is none."""
    token_ids = {text: tokenizer.encode(text, False) for text in ends.texts}
    ids = {text: run[0] for text, run in token_ids.items() if len(run) == 1}
    given: tuple[int | str, ...] = (*ends.texts, *ends.ids)
    found = [(end, ids.get(end, -1) if isinstance(end, str) else end) for end in given]
    return KnownEnds(
        tuple(token_id for _, token_id in found if 0 <= token_id < vocab_size),
        tuple(end for end, token_id in found if not 0 <= token_id < vocab_size),
    )


def _cannot_be_served(version: AdapterVersion, error: LoraplexError) -> LoraplexError:
    """Return the error for one name; several names and tenants may share a content."""
    message = f"adapter {version.name!r} cannot be served any longer: {error.message}"
    return type(error)(message)


class Encode(Protocol):
    def __call__(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...


def with_bad_token_ids(sampling: SamplingParams, encode: Encode) -> SamplingParams:
    """Return the parameters with their bad_words moved to the bad_token_ids."""
    if not sampling.bad_words:
        return sampling
    runs = dict.fromkeys((*sampling.bad_token_ids, *_token_runs(sampling.bad_words, encode)))
    return msgspec.structs.replace(sampling, bad_words=(), bad_token_ids=tuple(runs))


def _token_runs(words: Iterable[str], encode: Encode) -> Iterable[tuple[int, ...]]:
    """Yield the tokens of each word at the beginning of a text and after a space, as vLLM does."""
    for word in words:
        bare = word.lstrip(" ") or word
        for text in (word, bare, f" {bare}"):
            run = tuple(encode(text, add_special_tokens=False))
            if run:
                yield run


def select_steps(
    records: Sequence[StepRecord], limit: int, after_ns: int | None = None
) -> Sequence[StepRecord]:
    """Return the newest records, oldest first; with after_ns the first ones that started later.

    A new engine begins with step 1 again, but its steps start later than those of the last one.
    """
    if after_ns is None:
        return list(itertools.islice(records, max(0, len(records) - limit), None))
    # A poll that follows the engine looks at the new records only.
    later = itertools.takewhile(lambda one: one.start_ns > after_ns, reversed(records))
    num_later = sum(1 for _ in later)
    first = len(records) - num_later
    return list(itertools.islice(records, first, first + min(num_later, limit)))
