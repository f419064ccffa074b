"""Names of the Triton models, and their metadata and configuration.

Without a model repository `ensemble` and `tensorrt_llm` are the first served base model, and every
base model is also served under its own name, text to text. With one, its declarations count. There
is one version of each.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

from loraplex.core.config import ModelConfig
from loraplex.core.errors import (
    InvalidRequestError,
    LoraplexError,
    ModelNotFoundError,
    UnsupportedFeatureError,
    cut,
)
from loraplex.core.principal import LOCAL, Principal
from loraplex.core.version import __version__
from loraplex.frontends.kserve.errors import NotFoundError
from loraplex.frontends.kserve.models.kinds import (
    BLS,
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    TENSORRT_LLM,
    VLLM,
    BackendDialect,
)
from loraplex.frontends.kserve.models.model_control import ModelControl
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration, ModelTexts, TritonModel
from loraplex.frontends.kserve.wire_types import ServerMetadata
from loraplex.serving.backend import Backend, ModelCard

KINDS = (ENSEMBLE, TENSORRT_LLM, PREPROCESSING, POSTPROCESSING, BLS)
DEFAULT_MAX_BATCH_SIZE = 128

STEPS_OF_ENSEMBLE = ("preprocessing", "tensorrt_llm", "postprocessing")
"""Kinds of models that an ensemble is made of, all of its base model. A BLS calls them, too."""
_GENERATING = (TENSORRT_LLM.name, VLLM.name)

StartModel = Callable[[str, ModelConfig], Awaitable[None]]
"""Starts one more base model: its name and settings. Raises why it cannot."""

SERVER_NAME = "triton"
"""What clients of Triton may compare; the version is ours."""

EXTENSIONS = (
    "classification",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
    "generate",
)


def server_metadata() -> ServerMetadata:
    """Response to a server metadata request. Extensions are those that are served."""
    return ServerMetadata(name=SERVER_NAME, version=__version__, extensions=list(EXTENSIONS))


class Catalog:
    """The served Triton models, always as the backend has them now."""

    def __init__(
        self,
        backend: Backend,
        *,
        max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
        declarations: Sequence[ModelDeclaration] = (),
        control: ModelControl | None = None,
        start_model: StartModel | None = None,
    ) -> None:
        """declarations: of a model repository; none: every base model under our default names.
        start_model: starts the base model of a model that control discovers.
        """
        self._control = control or ModelControl()
        self._backend = backend
        self._max_batch_size = max_batch_size
        self._declarations = {each.name: each for each in declarations}
        self._start_model = start_model
        self._turn = asyncio.Lock()
        """Loads run one after the other."""
        self._made_from: tuple[Sequence[ModelCard], int] | None = None
        self._models: Mapping[str, TritonModel] = {}
        self._loaded: Collection[str] = ()
        self._token_models: Mapping[str, TritonModel] = {}
        self._steps: Mapping[str, Mapping[str, str]] = {}
        """See `steps`; by the name of the ensemble or the BLS."""

    def models(self, principal: Principal = LOCAL) -> Sequence[TritonModel]:
        """Models that are loaded and that the principal may use."""
        self._refresh()
        names = {card.name for card in self._backend.models(principal)}
        usable = [model for model in self._models.values() if model.card.name in names]
        return [model for model in usable if model.name in self._loaded]

    def token_model(self, model: TritonModel) -> TritonModel | None:
        """The loaded model that generates for others of the same base model, if there is one."""
        self._refresh()
        return self._token_models.get(model.card.name)

    def has_vllm_gauges(self, base_model: str) -> bool:
        """Return False for a model of the vLLM backend that does not report its metrics."""
        self._refresh()
        models = [each for each in self._models.values() if each.card.name == base_model]
        return all(
            each.options.reports_metrics
            for each in models
            if each.kind.dialect is BackendDialect.VLLM
        )

    def steps(self, model: TritonModel) -> Mapping[str, str]:
        """Names by kind of the loaded models that do the work of an ensemble or a BLS: those
        that its configuration names, else the first ones of its base model. Other kinds have none.
        """
        self._refresh()
        return self._steps.get(model.name, {})

    def _refresh(self) -> None:
        """Make the models, unless nothing has changed that they are made from."""
        made_from = (tuple(self._backend.models()), self._control.revision)
        if made_from == self._made_from:
            return
        cards = {card.name: card for card in made_from[0]}
        changed = [self._control.changed(each.name) or each for each in self._declared().values()]
        changed.sort(key=lambda each: not self._control.is_loaded(each.name))
        models: list[TritonModel] = []
        steps: dict[str, Mapping[str, str]] = {}
        for each in changed:
            if each.base_model in cards:
                workers = _workers(each, changed)
                card, texts = cards[each.base_model], ModelTexts(self._backend, each.base_model)
                model = _composed(each, workers)
                fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
                models.append(TritonModel(**fields, card=card, texts=texts))
                steps[each.name] = {
                    step: workers[step].name
                    for step in STEPS_OF_ENSEMBLE
                    if step in workers and self._control.is_loaded(workers[step].name)
                }
        self._steps = steps
        self._loaded = {each.name for each in changed if self._control.is_loaded(each.name)}
        self._models = {model.name: model for model in models}
        self._token_models = {
            model.card.name: model
            for model in reversed(models)  # of several the first
            if model.kind.name in _GENERATING and self._control.is_loaded(model.name)
        }
        self._made_from = made_from

    def _declared(self) -> Mapping[str, ModelDeclaration]:
        """Declarations by name, as they were at the start."""
        cards = self._backend.models()
        if self._declarations or not cards:
            return self._declarations
        names = [(kind.name, kind, cards[0]) for kind in KINDS]
        taken = {kind.name for kind in KINDS}
        names += [(card.name, ENSEMBLE, card) for card in cards if card.name not in taken]
        return {
            name: ModelDeclaration(
                name=name, kind=kind, base_model=card.name, max_batch_size=self._max_batch_size
            )
            for name, kind, card in names
        }

    async def load(self, name: str, parameters: Mapping[str, object]) -> None:
        """Load an ensemble with its steps, as at the start.

        Raises NotReadyError without explicit control, InvalidRequestError, UnsupportedFeatureError,
        and NotFoundError for a model that no repository has; then nothing is changed.
        """
        self._control.check_explicit()
        async with self._turn:
            declared = dict(self._declared())
            settings = await self._discovered(name, declared)
            read = self._control.read(
                declared[name], parameters, lambda model: _parts(model, declared.values())
            )
            if settings is not None:
                await self._start(name, declared[name].base_model, settings)
                self._declarations = declared
            self._control.load(read)

    async def _discovered(
        self, name: str, declared: dict[str, ModelDeclaration]
    ) -> ModelConfig | None:
        """Add a model whose base model does not run to the declared ones; return the settings of
        that base model.
        """
        served = {card.name for card in self._backend.models()}
        if name in declared and declared[name].base_model in served:
            return None
        if self._control.discover is None:
            raise NotFoundError(
                f"failed to load '{name}', failed to poll from model repository; its models are: "
                f"{', '.join(declared)}"
            )
        found = await asyncio.to_thread(self._control.discover, name)
        # The models of base models that run stay as they were at the start.
        new = {each.name: each for each in found.declarations if each.base_model not in served}
        declared |= new
        return found.settings if name in new else None

    async def _start(self, name: str, base_model: str, settings: ModelConfig) -> None:
        assert self._start_model is not None, "who discovers models starts them"
        try:
            await self._start_model(base_model, settings)
        except LoraplexError as error:
            raise InvalidRequestError(f"failed to load '{name}': {error.message}") from error

    def unload(self, name: str, *, with_dependents: bool = False) -> None:
        """Take a name from clients, of an ensemble with its steps. An unknown one is fine."""
        self._control.check_explicit()
        declared = self._declared()
        if name not in declared:
            return
        names = {name}
        if with_dependents:
            model = self._control.changed(name) or declared[name]
            names |= {each.name for each in _parts(model, declared.values())}
        self._control.unload(names)

    def find(
        self, name: str, version: str = "", principal: Principal = LOCAL, *, end_point: str = ""
    ) -> TritonModel:
        """Raises ModelNotFoundError in Triton's words, with the names that there are.

        end_point: what takes exactly one response, in the words of Triton's own error. Raises
        UnsupportedFeatureError if the model may give any number of them.
        """
        self._refresh()
        model = self._models.get(name)
        if model is not None and principal is not LOCAL:  # _refresh runs for LOCAL
            names = [card.name for card in self._backend.models(principal)]
            model = model if model.card.name in names else None
        if model is None:
            served = ", ".join(model.name for model in self.models(principal)) or "none"
            raise ModelNotFoundError(
                f"Request for unknown model: '{cut(name)}' is not found; the models are: {served}",
                param="model",
            )
        if name not in self._loaded:
            raise ModelNotFoundError(
                f"Request for unknown model: '{cut(name)}' has no available versions", param="model"
            )
        if version not in ("", model.version):
            raise ModelNotFoundError(
                f"Request for unknown model: '{name}' version {version} is not found; the version "
                f"is {model.version}",
                param="model",
            )
        if end_point and model.is_decoupled:
            raise UnsupportedFeatureError(
                f"{end_point} doesn't support models with decoupled transaction policy"
            )
        return model

    def is_ready(self, name: str, version: str = "", principal: Principal = LOCAL) -> bool:
        """False for an unknown model or version, too."""
        try:
            model = self.find(name, version, principal)
        except ModelNotFoundError:
            return False
        return self._backend.model_ready(model.card.name)

    def index(
        self, *, only_ready: bool = False, principal: Principal = LOCAL
    ) -> list[dict[str, str]]:
        """The repository index: name, version, state and reason of every model."""
        rows = []
        for each in self._declared().values():
            if each.base_model not in principal.rights.models:
                continue
            model = self._control.changed(each.name) or each
            reason = self._reason(model)
            if not (reason and only_ready):
                row = {"name": model.name, "version": model.version}
                rows.append(
                    {**row, "state": "UNAVAILABLE" if reason else "READY", "reason": reason}
                )
        return rows

    def _reason(self, model: ModelDeclaration) -> str:
        """Why a model is not ready; empty if it is."""
        if not self._control.is_loaded(model.name):
            return "unloaded" if self._control.was_unloaded(model.name) else "not loaded"
        return self._backend.model_problem(model.base_model)


def _parts(
    model: ModelDeclaration, declared: Iterable[ModelDeclaration]
) -> Sequence[ModelDeclaration]:
    """The declared models that are loaded with an ensemble; none with another kind, as a BLS finds
    its models only when it calls them.
    """
    if model.kind.name != ENSEMBLE.name:
        return ()
    named = _step_names(model)
    if named:
        return [each for each in declared if each.name in named]
    return [
        each
        for each in declared
        if each.base_model == model.base_model and each.kind.name in STEPS_OF_ENSEMBLE
    ]


def _step_names(model: ModelDeclaration) -> set[str]:
    """The models that an ensemble passes its tensors through, or that the program of a BLS calls
    by name, in addition to its tensorrt_llm.
    """
    if model.kind.name == BLS.name:
        return {PREPROCESSING.name, POSTPROCESSING.name}
    scheduling = (model.config or {}).get("ensemble_scheduling", {})
    return {step.get("model_name", "") for step in scheduling.get("step", ())}


def _workers(
    model: ModelDeclaration, declared: Sequence[ModelDeclaration]
) -> dict[str, ModelDeclaration]:
    """The models that do the work of an ensemble or a BLS, by the names of steps: those that it
    names, also of another base model, else the first ones of its own. Other kinds have none.
    """
    workers: dict[str, ModelDeclaration] = {}
    if model.kind.name not in (ENSEMBLE.name, BLS.name):
        return workers
    named = _step_names(model)
    for inner in declared:
        if inner.kind.name == BLS.name and inner.name in named:
            workers[BLS.name] = inner
            named |= _step_names(inner)
    for each in sorted(declared, key=lambda each: each.name not in named):
        # A vLLM model generates, as tensorrt_llm does.
        step = TENSORRT_LLM.name if each.kind.name == VLLM.name else each.kind.name
        is_own = each.base_model == model.base_model
        if step in STEPS_OF_ENSEMBLE and (is_own or each.name in named):
            workers.setdefault(step, each)
    return workers


def _composed(model: ModelDeclaration, workers: Mapping[str, ModelDeclaration]) -> ModelDeclaration:
    """An ensemble or a BLS with the options of the models that do its work, as these are now."""
    outer = workers.get(BLS.name, model)
    own = outer.options
    core = workers.get(TENSORRT_LLM.name, model)
    options = dataclasses.replace(
        core.options,
        accumulates_tokens=own.accumulates_tokens,
        has_draft_model=own.has_draft_model,
        ends_by_default=own.ends_by_default,
    )
    if (first := workers.get(PREPROCESSING.name)) is not None:
        prepared = first.options
        options = dataclasses.replace(options, adds_special_tokens=prepared.adds_special_tokens)
        if outer.kind.name == BLS.name:  # passes on whatever preprocessing prepares
            options = dataclasses.replace(options, ends_by_default=prepared.ends_by_default)
    if (last := workers.get(POSTPROCESSING.name)) is not None:
        skips = last.options.skips_special_tokens
        options = dataclasses.replace(options, skips_special_tokens=skips)
    model = dataclasses.replace(model, options=options)
    is_step = model.kind.name == ENSEMBLE.name and core.name in _step_names(model)
    if not is_step or core.is_decoupled == model.is_decoupled:
        return model
    # As in Triton, the policy of an ensemble is that of its steps.
    policy = {"model_transaction_policy": {"decoupled": core.is_decoupled}}
    config = None if model.config is None else {**model.config, **policy}
    return dataclasses.replace(model, is_decoupled=core.is_decoupled, config=config)
