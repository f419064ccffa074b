"""Model of EchoBackend: its card, its chat template, and the numbers that a test sets."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from loraplex.adapters.staging import RequestTensor
from loraplex.core.adapter import Residency
from loraplex.core.errors import (
    InvalidRequestError,
    LoraplexError,
    NotReadyError,
    TokenOutOfVocabularyError,
)
from loraplex.core.request import RequestId
from loraplex.core.stats import AdapterActivity, Durations, EngineStats, StepRecord
from loraplex.serving.adapter_cards import UnloadMode
from loraplex.serving.backend import ModelCard
from loraplex.serving.model_memory import ModelMemory, StoredAdapters
from loraplex.serving.step_records import select_steps
from loraplex.serving.text.chat_format import UNKNOWN_FORMAT, ChatFormat
from loraplex.testing import echo_tokenizer
from loraplex.testing.echo_adapters import CREATED, EchoAdapters

ROLES = ("system", "developer", "user", "assistant", "tool")


def echo_chat_prompt(
    messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
) -> str:
    """The chat template: `<s>` and one `role: content` line per message, then `assistant: `."""
    lines = []
    for message in messages:
        if message.get("role") not in ROLES:
            raise InvalidRequestError(
                f"the chat template knows the roles {', '.join(ROLES)}; got {message.get('role')!r}"
            )
        lines.append(f"{message['role']}: {_text(message.get('content'))}\n")
    return "<s>" + "".join(lines) + ("assistant: " if add_generation_prompt else "")


def _text(content: str | Sequence[Mapping[str, str]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)


def echo_card(
    name: str, *, max_model_len: int = 4096, chat: ChatFormat = UNKNOWN_FORMAT
) -> ModelCard:
    """Return the card of a model that EchoBackend serves."""
    return ModelCard(
        name=name,
        path=f"/models/{name}",
        created=CREATED,
        max_model_len=max_model_len,
        vocab_size=echo_tokenizer.VOCAB_SIZE,
        eos_token_id=echo_tokenizer.EOS_TOKEN_ID,
        pad_token_id=echo_tokenizer.PAD_TOKEN_ID,
        dtype="float32",
        kv_dtype="float32",
        chat=chat,
    )


class EchoState:
    """State that an EchoBackend shares with its models; a test may set and read it at any time."""

    def __init__(self) -> None:
        self.adapter_registry = EchoAdapters()
        self.residency: dict[str, Residency] = {}
        """Where the adapters are, by digest."""
        self.engine_stats = EngineStats()
        self.engine_restarts: dict[str, int] = {}
        self.activity: AdapterActivity | None = None
        """None: that of `residency`, without requests."""
        self.model_memory: ModelMemory | None = None
        """None: the engine has never started."""
        self.step_records: list[StepRecord] = []
        self.prompt_ending = ""
        """Text that the chat template appends to every prompt."""
        self.renderings: list[Mapping[str, Any]] = []
        """Arguments of each rendering of the chat template."""
        self.num_cached_tokens = 0
        """Number that the timing of every request reports."""
        self.scripts: deque[tuple[str, ...]] = deque()
        """Outputs of the next requests instead of the echo: a text for each sequence."""
        self.finished: list[RequestId] = []
        self.aborted: list[RequestId] = []
        self.delay_seconds = 0.0
        """Pause before every output, and before a request's adapter is registered."""
        self.load_faults: deque[LoraplexError] = deque()
        """Errors of the next loads of adapters."""
        self.unload_modes: list[UnloadMode] = []
        self.adapter_tensors: list[tuple[RequestTensor, RequestTensor]] = []


class EchoModel:
    """Implementation of serving.backend.Model."""

    def __init__(self, card: ModelCard, state: EchoState) -> None:
        self.card = card
        self._state = state

    @property
    def stats(self) -> EngineStats:
        return self._state.engine_stats

    @property
    def engine_restarts(self) -> Mapping[str, int]:
        return self._state.engine_restarts

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        self._state.renderings.append(options)
        documents = options.get("documents") or ()
        found = [{"role": "system", "content": str(dict(one))} for one in documents]
        continues = options.get("continue_final_message", False)
        adds_prompt = options.get("add_generation_prompt", True) and not continues
        prompt = echo_chat_prompt([*found, *messages], add_generation_prompt=adds_prompt)
        return (prompt.removesuffix("\n") if continues else prompt) + self._state.prompt_ending

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return echo_tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        is_continuation: bool = False,
    ) -> str:
        del is_continuation  # a token is a byte, wherever it stands
        self.check_vocabulary(token_ids)
        return echo_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        self.check_vocabulary((token_id,))
        return echo_tokenizer.token_bytes(token_id)

    def adapter_names(self) -> Sequence[tuple[str, str]]:
        cards = self._state.adapter_registry.cards(self.card.name)
        return [(card.name, card.digest) for card in cards]

    async def adapter_residency(self) -> Mapping[str, Residency]:
        return dict(self._state.residency)

    async def adapter_activity(self) -> AdapterActivity:
        return self._state.activity or AdapterActivity(dict(self._state.residency))

    def memory(self) -> ModelMemory:
        if self._state.model_memory is None:
            raise NotReadyError(f"model {self.card.name!r} is starting", retry_after_seconds=2)
        return self._state.model_memory

    async def stored_adapters(self) -> StoredAdapters:
        cards = self._state.adapter_registry.cards(self.card.name)
        return StoredAdapters(adapters=len(cards), files=0, num_bytes=0)

    def load_times(self) -> Mapping[str, Durations]:
        tiers = self.stats.adapters
        return {"read": tiers.read_times, "copy": tiers.copy_times}

    def steps(self, limit: int, after_ns: int | None = None) -> Sequence[StepRecord]:
        return select_steps(self._state.step_records, limit, after_ns)

    def check_vocabulary(self, token_ids: Sequence[int]) -> None:
        """Raise TokenOutOfVocabularyError for an id that is no byte and no special token."""
        size = self.card.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise TokenOutOfVocabularyError(
                    f"token id {token_id} is not in the vocabulary: ids are 0 to {size - 1}",
                    param="prompt",
                )
