"""loraplex as a library: `LLM`, whose methods return when their work is done."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Unpack

from loraplex.app.llm_arguments import Adapter, Chat, RequestOptions
from loraplex.app.llm_outputs import Classified, Completion, Embedded, Generated, Prompt, Scored
from loraplex.app.local_model import Engine, LocalModel
from loraplex.core.output import RequestOutput
from loraplex.core.principal import LOCAL
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.stats import EngineStats
from loraplex.serving.adapter_cards import (
    AdapterCard,
    AdapterDetails,
    Unloaded,
    UnloadMode,
    VersionCard,
)
from loraplex.serving.compare import Compared

__all__ = ["LLM", "Classified", "Completion", "Embedded", "Generated", "Prompt", "Scored"]


class LLM:
    """A base model with its adapters, in this process.

        with LLM("path/to/model", adapters={"zh": "path/to/adapter"}) as llm:
            outputs = llm.generate(["Hello", "Hello"], adapter=[None, "zh"])

    Args:
        model: Hugging Face folder or hub id.
        adapters: paths of adapters by name.
        engine: "thread" runs the engine in this process, "process" in one of its own.
        state_dir: folder of staged adapters (default: the model's in the user's state directory).
        settings: any setting of a served model (see core.config.ModelConfig): dtype, device,
            max_model_len, max_num_seqs, kv_cache_bytes, max_lora_rank, ...

    Raises ConfigError for a wrong model or setting. Thread-safe. It works in the process that made
    it: in one that was forked from it, each method raises ConfigError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        *,
        engine: Engine = "thread",
        state_dir: str | os.PathLike[str] = "",
        **settings: Any,
    ) -> None:
        self._model = LocalModel(model, adapters, engine, state_dir, settings)
        self._wait = self._model.loop.wait

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise TypeError("an LLM cannot be sent to another process: make one in that process")

    def close(self) -> None:
        """Stop the engine; running prompts end with an error. Safe to call twice."""
        self._model.loop.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: Adapter | Sequence[Adapter | None] | None = None,
        lora_task_id: int | Sequence[int | None] | None = None,
        lora_weights: Any = None,
        lora_config: Any = None,
        load_lora_weights: Literal["auto", "always", "never"] = "auto",
        **options: Unpack[RequestOptions],
    ) -> list[Generated]:
        """Complete prompts together; the results have the order of the prompts.

        Each argument is one value for all prompts, or a list with one for each. No adapter is the
        base model; {"fr": 0.7, "legal": 0.3} composes two. `lora_task_id`, `lora_weights` and
        `lora_config` are TensorRT-LLM's, the latter two arrays of numpy or torch: they register an
        adapter, which later requests name by its id alone. `options` (priority, timeout_seconds,
        end_id, retention) apply to all prompts. Raises the first error, in the order of the
        prompts, after all have ended; if an adapter of arrays is refused, none begins.
        """
        return self._wait(
            self._model.generate(
                *(prompts, sampling_params, adapter, options),
                lora_task_id=lora_task_id,
                lora_weights=lora_weights,
                lora_config=lora_config,
                load_lora_weights=load_lora_weights,
            )
        )

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        adapter: Adapter | Sequence[Adapter | None] | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Embedded]:
        """Return the vectors of texts, in one batch; the results have the order of the texts.

        texts: texts or lists of token ids. adapter: as in `generate`. dimensions: keep so many
        first values. normalize: divide by the length; None does what the model's folder states, and
        shorter vectors always have the length 1. prompt_name: the prompt of the folder
        (config_sentence_transformers.json) that is put before each text; None: its default.
        Raises as `generate`, and UnsupportedFeatureError if the folder has a pooling or a module
        that is not computed here.
        """
        return self._wait(
            self._model.embed(
                *(texts, adapter, options),
                dimensions=dimensions,
                normalize=normalize,
                prompt_name=prompt_name,
            )
        )

    def classify(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        adapter: Adapter | Sequence[Adapter | None] | None = None,
        use_activation: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Classified]:
        """Return the labels of texts, in one batch; the results have the order of the texts.

        The adapter's own classification head is used, else the model's. texts: texts or lists of
        token ids. adapter: as in `generate`. use_activation: False returns the head's scores;
        otherwise they become probabilities as config.json states.
        Raises as `generate`, and UnsupportedFeatureError if neither has a head.
        """
        work = self._model.classify(texts, adapter, options, use_activation=use_activation)
        return self._wait(work)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        adapter: Adapter | None = None,
        instruction: str | None = None,
        use_activation: bool = True,
        **options: Unpack[RequestOptions],
    ) -> list[Scored]:
        """Return how well documents fit queries, in one batch and in the order of the documents.

        queries: one for all documents, or one for each. adapter: of all pairs. instruction: what
        the model is to look for; None: its own. use_activation: False returns the model's values
        without the sigmoid.
        Embedding models give the cosine of the vectors; others what a classification head, or the
        tokens of a judgement, give for both texts, as the model's folder states.
        Raises as `generate`, and UnsupportedFeatureError if the folder states nothing.
        """
        return self._wait(
            self._model.score(
                *(queries, documents, adapter, options),
                instruction=instruction,
                use_activation=use_activation,
            )
        )

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: Adapter | Sequence[Adapter | None] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Generated]:
        """Continue conversations by the model's chat template, as `generate` completes prompts.

        messages: one conversation, a list of {"role": ..., "content": ...}, or several.
        """
        return self._wait(self._model.chat(messages, sampling_params, adapter, tools, options))

    def stream(
        self,
        prompt: Prompt | Chat,
        sampling_params: SamplingParams | None = None,
        *,
        adapter: Adapter | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[RequestOutput]:
        """Complete a prompt, or continue a conversation; yield what is new after each step.

            for output in llm.stream([{"role": "user", "content": "Hello"}], adapter="zh"):
                print(output.text, end="", flush=True)

        The last output has the timing. An iterator that is closed early ends the request.
        """
        return self._model.loop.iterate(
            self._model.stream(prompt, sampling_params, adapter, options)
        )

    @property
    def has_chat_template(self) -> bool:
        """Return whether the model has a chat template, which `chat` needs."""
        return bool(self._model.service.model(self._model.name).chats.text)

    def compare(
        self,
        prompt: Prompt,
        adapters: Sequence[Adapter | None],
        sampling_params: SamplingParams | None = None,
    ) -> list[Compared]:
        """Complete one prompt with each of the adapters in one batch; None is the base model.

        The default is greedy decoding; with other sampling parameters all adapters use one seed.
        The entry of an adapter that fails is its error. If None is among the adapters, each entry
        includes where its output first differs from the base model's.
        """
        return self._wait(self._model.compare(prompt, adapters, sampling_params))

    def add_adapter(
        self,
        name: str | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        task_id: int | None = None,
        replace: bool = False,
        dry_run: bool = False,
        canary: bool = False,
        lora_weights: Any = None,
        lora_config: Any = None,
    ) -> AdapterCard:
        """Load an adapter, and return its description. An error changes nothing.

        An adapter from a path gets a name; see `serving.backend.Backend.load_adapter` for the
        flags. An adapter from arrays, as `generate` takes them, is named by its task id or digest.
        """
        return self._wait(
            self._model.add_adapter(
                *(name, path),
                task_id=task_id,
                replace=replace,
                dry_run=dry_run,
                canary=canary,
                lora_weights=lora_weights,
                lora_config=lora_config,
            )
        )

    def remove_adapter(self, name: str, mode: UnloadMode | str = UnloadMode.DRAIN) -> Unloaded:
        """Unload an adapter; its running requests end normally, or at once ("immediate")."""
        return self._wait(self._model.remove_adapter(name, mode))

    def rollback_adapter(self, name: str, version: int | None = None) -> AdapterCard:
        """Restore an older version of an adapter: by default the one before the present one."""
        return self._wait(self._model.rollback_adapter(name, version))

    def pin_adapter(
        self, name: str, version: int | None = None, *, pinned: bool = True
    ) -> VersionCard:
        """Pin a version, so that it is never removed, or unpin it; None: the present version."""
        return self._wait(self._model.pin_adapter(name, version, pinned=pinned))

    def alias_adapter(self, name: str, alias: str, *, replace: bool = False) -> AdapterCard:
        """Give an adapter another name; remove_adapter removes that name."""
        return self._wait(self._model.alias_adapter(name, alias, replace=replace))

    def adapter(self, name: str) -> AdapterDetails:
        """Return the description of an adapter with its versions."""
        return self._wait(self._model.describe_adapter(name))

    def adapters(self) -> list[AdapterCard]:
        """Return the adapters that are loaded."""
        return list(self._model.service.adapters(LOCAL))

    def stats(self) -> EngineStats:
        """Return the engine's present numbers."""
        return self._model.service.model(self._model.name).stats
