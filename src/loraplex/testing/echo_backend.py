"""A whole Backend in memory, for tests of front ends and clients: no model, no torch, no files.

Its output is a pure function of model, adapters, prompt and sequence index (echo_sequence), a token
is a byte (echo_tokenizer), and every output carries one token per running sequence. A bad day can
be requested: delays, errors at admission or in mid-stream, a server that is not ready. What the
front end did is recorded: `requests`, `finished`, `aborted`, `adapter_tensors`.
"""

import itertools
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from loraplex.adapters.uploads import Uploads
from loraplex.core.adapter import (
    AdapterChoice,
    AdapterKey,
    ByName,
    LoadPolicy,
    not_in_cache,
)
from loraplex.core.errors import (
    InvalidRequestError,
    LoraplexError,
    ModelNotFoundError,
    PermissionDeniedError,
    PromptTooLongError,
)
from loraplex.core.output import RequestOutput, ResolvedAdapter
from loraplex.core.principal import LOCAL, Principal, TenantUsage
from loraplex.core.request import GenerateRequest, RequestId, check_adapters
from loraplex.serving.adapter_cards import (
    AdapterCard,
    LoadReport,
)
from loraplex.serving.adapter_list import AdapterPage, AdapterQuery, page_of
from loraplex.serving.adapter_usage import AdapterUsage
from loraplex.serving.admission import cut_prompt
from loraplex.serving.backend import Health, ModelCard
from loraplex.serving.model_names import base_of, readings
from loraplex.serving.text.chat_format import UNKNOWN_FORMAT, ChatFormat
from loraplex.testing.echo_admin import EchoAdmin
from loraplex.testing.echo_model import EchoModel, EchoState, echo_card
from loraplex.testing.echo_stream import EchoStream, Fault


class EchoBackend(EchoState):
    """Implementation of serving.backend.Backend. Not thread-safe: one event loop calls it.

    A test may set and read the public fields at any time. `num_cached_tokens` is reported in the
    timing of every request; while `unready_reason` is set, neither server nor models are ready.
    """

    def __init__(
        self,
        models: Sequence[str] = ("echo",),
        *,
        max_model_len: int = 4096,
        delay_seconds: float = 0.0,
        chat: ChatFormat = UNKNOWN_FORMAT,
    ) -> None:
        """`chat` is how all of the models write reasoning and tool calls."""
        super().__init__()
        self.adapter_usage = AdapterUsage()
        self.delay_seconds = delay_seconds
        self.unready_reason = ""
        self.requests: list[GenerateRequest] = []
        self._models = {
            name: EchoModel(echo_card(name, max_model_len=max_model_len, chat=chat), self)
            for name in models
        }
        self.adapter_admin = EchoAdmin(self, self)
        self.uploads: Uploads | None = None
        self._faults: deque[Fault] = deque()
        self._request_ids = itertools.count(1)

    def plant(self, error: LoraplexError, *, after_outputs: int | None = None) -> None:
        """Let the next request fail: at admission, or after so many outputs. Faults queue up."""
        self._faults.append(Fault(error, after_outputs))

    def plant_load(self, error: LoraplexError) -> None:
        """Let the next load of an adapter fail."""
        self.load_faults.append(error)

    def register(self, name: str, **options: Any) -> LoadReport:
        """Register an adapter without awaiting, as `EchoAdmin.register`."""
        return self.adapter_admin.register(name, **options)

    def new_request_id(self) -> RequestId:
        return next(self._request_ids)

    def health(self) -> Health:
        return Health(live=True, ready=not self.unready_reason, reason=self.unready_reason)

    def usage(self, principal: Principal) -> TenantUsage:
        del principal
        return TenantUsage(
            concurrent_requests=0, requests_last_minute=None, tokens_last_minute=None
        )

    def model_ready(self, model: str) -> bool:
        return model in self._models and not self.unready_reason

    def models(self, principal: Principal = LOCAL) -> Sequence[ModelCard]:
        del principal
        return [model.card for model in self._models.values()]

    def model(self, name: str) -> EchoModel:
        if name not in self._models:
            raise self._unknown(name)
        return self._models[name]

    def adapters(self, principal: Principal, model: str | None = None) -> Sequence[AdapterCard]:
        del principal
        return self.adapter_registry.cards(model)

    async def adapter_page(self, principal: Principal, query: AdapterQuery) -> AdapterPage:
        del principal
        return page_of(self.adapter_registry.rows(self.residency), query)

    async def find(self, name: str, principal: Principal) -> tuple[ModelCard, AdapterKey | None]:
        del principal
        cards = self.models()
        base = base_of(name, cards)
        if base is not None:
            return self._models[base].card, None
        for group in readings(name, cards):
            matches = [
                (model, adapter)
                for model, adapter in group
                if self.adapter_registry.find(model, adapter) is not None
            ]
            if len(matches) > 1:
                choices = " or ".join(f"{model}:{adapter}" for model, adapter in matches)
                raise ModelNotFoundError(f"{name!r} is ambiguous; use {choices}", param="model")
            if matches:
                model, adapter = matches[0]
                return self._models[model].card, ByName(adapter)
        raise self._unknown(name)

    async def generate(
        self, request: GenerateRequest, principal: Principal
    ) -> AsyncIterator[RequestOutput]:
        self.requests.append(request)
        fault = self._faults.popleft() if self._faults else None
        if fault is not None and fault.after_outputs is None:
            raise fault.error
        request.sampling.validate()
        check_adapters(request.adapters)
        prompt_token_ids = self._prompt_token_ids(request)
        if request.adapters and not principal.rights.use:
            raise PermissionDeniedError("this key may not use adapters")
        adapters = tuple(self._resolve(request, choice) for choice in request.adapters)
        return EchoStream(
            self, self.model(request.model).card, request, prompt_token_ids, adapters, fault
        )

    def _unknown(self, name: str) -> ModelNotFoundError:
        served = [*self._models, *(card.name for card in self.adapters(LOCAL))]
        return ModelNotFoundError(
            f"there is no model or adapter {name!r}; there are: {', '.join(served)}", param="model"
        )

    def _prompt_token_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        model = self.model(request.model)
        card = model.card
        if isinstance(request.prompt, str):
            add_special_tokens = request.add_special_tokens
            token_ids = tuple(model.tokenize(request.prompt, add_special_tokens=add_special_tokens))
        else:
            token_ids = request.prompt
        token_ids = tuple(cut_prompt(request, token_ids, card))
        model.check_vocabulary(token_ids)
        if not token_ids:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        if len(token_ids) >= card.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens; with one to generate, the model's limit "
                f"of {card.max_model_len} leaves {card.max_model_len - 1}",
                param="prompt",
            )
        return token_ids

    def _resolve(self, request: GenerateRequest, choice: AdapterChoice) -> ResolvedAdapter:
        version = self.adapter_registry.resolve(request.model, choice.key)
        if request.load_policy is LoadPolicy.NEVER and version.digest not in self.residency:
            raise not_in_cache(f"the adapter {version.digest[:12]}")
        return ResolvedAdapter(version.name, version.digest, choice.scale)
