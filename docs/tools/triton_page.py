"""docs/support-triton.md: what clients and operators of Triton, of its TensorRT-LLM backend and of
its vLLM backend know, and what is done with it here.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from prometheus_client.core import Metric
from tritonclient.grpc import service_pb2

from loraplex.cli.compat import LAUNCH_FLAGS, convert_lora, extract_lora, fill_template
from loraplex.cli.triton import FLAGS, OWN_FLAGS
from loraplex.compat.client.programs import PROGRAMS
from loraplex.compat.convert.flag_tables import BUILD_FLAGS, CHECKPOINT_FLAGS
from loraplex.compat.triton.roles import KINDS, PART_PARAMETERS, TENSORRT_LLM_PARAMETERS, Role
from loraplex.compat.triton.setting_rows import ENGINE_ARGS
from loraplex.core.metrics_config import MetricsConfig
from loraplex.core.support import Feature, Section, Support, support_of
from loraplex.frontends.kserve.grpc.health import SERVICE as HEALTH_SERVICE
from loraplex.frontends.kserve.grpc.servicer import ERRORS_END_STREAM, TritonServicer
from loraplex.frontends.kserve.http.body import HEADER_LENGTH
from loraplex.frontends.kserve.http.routes import Resource, kserve_routes
from loraplex.frontends.kserve.management import FIXED_TRACE_SETTINGS, OTHER_LOG_NAMES
from loraplex.frontends.kserve.management import LOG_DEFAULTS as LOG_SETTINGS
from loraplex.frontends.kserve.management import TRACE_DEFAULTS as TRACE_SETTINGS
from loraplex.frontends.kserve.messages import REQUEST_PARAMETERS, TENSOR_PARAMETERS
from loraplex.frontends.kserve.models.catalog import EXTENSIONS
from loraplex.frontends.kserve.models.kinds import FIELDS, IGNORED_INPUTS, TENSORRT_LLM, ModelKind
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration, ModelOptions
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.metric_families import ExactCounter
from loraplex.frontends.ops.gateway_metrics import GatewayCollector
from loraplex.frontends.ops.metrics import metrics_registry
from loraplex.serving.request_metrics import RequestMetrics
from support.echo_service import EchoService
from tools.markdown import command_features, page

_ONE_PATH = "any number of requests run together"

TEMPLATE_VARIABLES: Final = (
    Feature("triton_max_batch_size", note="the largest batch of a request [the build's]"),
    Feature("triton_backend", note="tensorrtllm or python: the same"),
    Feature("decoupled_mode", note="several responses to a request [False]"),
    Feature("engine_dir", note="the parameter gpt_model_path"),
    Feature("batching_strategy", note="the parameter gpt_model_type"),
    Feature("encoder_engine_dir", note="the parameter encoder_model_path"),
    Feature("max_queue_size", note="the setting `max_queue_size`; 0: any number may wait"),
    Feature("max_queue_delay_microseconds", note="the setting `max_queue_delay_microseconds`"),
    Feature("logits_datatype", note="of context_logits and generation_logits [TYPE_FP32]"),
    *(
        Feature(name, Support.NO_EFFECT, _ONE_PATH)
        for name in (
            "preprocessing_instance_count",
            "postprocessing_instance_count",
            "bls_instance_count",
        )
    ),
    Feature("encoder_input_features_data_type", Support.NO_EFFECT, "of encoder-decoder models"),
    Feature("prompt_embedding_table_data_type", Support.NO_EFFECT, "of prompt tuning"),
)


_LLM_API = "give the model's folder to `loraplex serve`"
_CPP = "see `loraplex bench`"


def _refused(note: str, names: str) -> tuple[Feature, ...]:
    return tuple(Feature(name, Support.REFUSED, note) for name in names.split())


ABSENT_METRICS: Final = (
    *_refused(
        "as in a Triton without a response cache: responses are not cached",
        "nv_cache_num_hits_per_model nv_cache_num_misses_per_model "
        "nv_cache_hit_duration_per_model nv_cache_miss_duration_per_model",
    ),
    *_refused("gone in the original, too", "vllm:request_params_best_of"),
    *_refused(
        "use an exporter for metrics of the machine, such as node-exporter or dcgm-exporter",
        "nv_cpu_utilization nv_cpu_memory_total_bytes nv_cpu_memory_used_bytes "
        "nv_gpu_utilization nv_gpu_memory_total_bytes nv_gpu_memory_used_bytes "
        "nv_gpu_power_usage nv_gpu_power_limit nv_energy_consumption",
    ),
    *_refused(
        "there is no such pool: see loraplex_memory_bytes",
        "nv_pinned_memory_pool_total_bytes nv_pinned_memory_pool_used_bytes",
    ),
)

NOT_SERVED: Final = (
    Section(
        "Models of TensorRT-LLM's LLM API",
        (
            *_refused(
                _LLM_API,
                "model.yaml model backend tensor_parallel_size pipeline_parallel_size "
                "pytorch_backend_config triton_config",
            ),
            *_refused(
                "of that model",
                "text_input streaming sampling_param_best_of sampling_param_temperature "
                "sampling_param_top_k sampling_param_top_p sampling_param_frequency_penalty "
                "sampling_param_presence_penalty sampling_param_max_tokens sampling_param_stop "
                "sampling_param_seed sampling_param_exclude_input_from_output "
                "sampling_param_return_perf_metrics return_finish_reason return_stop_reason "
                "return_cumulative_logprob text_output finish_reason stop_reason "
                "cumulative_logprob",
            ),
        ),
    ),
    Section(
        "Other models of TensorRT-LLM's backend",
        (
            *_refused("an old backend: see the five models", "all_models/gpt"),
            *_refused("models that see or hear", "all_models/multimodal all_models/whisper"),
            *_refused("disaggregated serving", "all_models/disaggregated_serving"),
        ),
    ),
    Section(
        "Benchmarks in C++ with adapters",
        (
            *_refused(_CPP, "prepare_dataset.py --rand-task-id --task-id"),
            *_refused(_CPP, "generate_rand_loras.py"),
            *_refused(
                _CPP,
                "gptManagerBenchmark --type --lora_dir --lora_host_cache_bytes "
                "--lora_num_device_mod_layers",
            ),
        ),
    ),
    Section(
        "Extensions that are not served",
        (
            Feature("sequence", Support.REFUSED, "no model keeps a state between requests"),
            Feature("cuda_shared_memory", Support.REFUSED, "use system shared memory"),
        ),
    ),
    Section(
        "Environment variables",
        (
            Feature("CUDA_VISIBLE_DEVICES", note="read by CUDA"),
            Feature(
                "TRTLLM_ORCHESTRATOR", Support.NO_EFFECT, "one process serves a model, without MPI"
            ),
            Feature(
                "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES",
                Support.NO_EFFECT,
                "one process serves a model, without MPI",
            ),
        ),
    ),
)


_HEADERS: Final = (
    Feature(HEADER_LENGTH, note="bytes of JSON before binary data"),
    Feature(
        "endpoint-load-metrics-format",
        Support.NO_EFFECT,
        "the response has no load: /metrics has it",
    ),
    Feature("endpoint-load-metrics", Support.REFUSED, "gateways read /metrics"),
    Feature("Content-Encoding", note="gzip or deflate, of infer"),
    Feature("Accept-Encoding", note="gzip or deflate, of infer"),
    Feature(ERRORS_END_STREAM, note="gRPC metadata; true: an error ends a stream"),
)

_SERVICE = "GRPCInferenceService"
_CONVERTER = re.compile(r":\w+}")
_FREE_LABELS = frozenset(
    {
        *("model", "version", "model_name", "adapter", "le", "quantile"),
        *("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        *("adapter_name", "level", "pinned", "block_size", "num_gpu_blocks"),
    }
)
_OURS = "loraplex_"
_MODEL = EchoService().models()[0].name
_DECLARATIONS = tuple(
    ModelDeclaration(
        name=name,
        kind=TENSORRT_LLM,
        base_model=_MODEL,
        max_batch_size=1,
        options=ModelOptions(is_static=name == "static"),
    )
    for name in ("inflight", "static")
)


def route_features() -> tuple[Feature, ...]:
    rows = []
    for route in kserve_routes(TritonService(EchoService())):
        assert isinstance(route.endpoint, Resource)
        path = _CONVERTER.sub("}", route.path)
        for method, support, note in route.endpoint.features:
            rows.append(Feature(f"{method} {path}", support, note))
    return tuple(rows)


def rpc_features() -> tuple[Feature, ...]:
    """RPCs of the service; those that the servicer does not have return UNIMPLEMENTED."""
    methods = service_pb2.DESCRIPTOR.services_by_name[_SERVICE].methods
    health = (Feature(f"{HEALTH_SERVICE}/{name}") for name in ("Check", "Watch"))
    return (*(_rpc(method.name) for method in methods), *health)


def _rpc(name: str) -> Feature:
    method = getattr(TritonServicer, name, None)
    if method is None:
        return Feature(name, Support.REFUSED, "UNIMPLEMENTED")
    return Feature(name, *support_of(method))


def setting_features() -> tuple[Feature, ...]:
    """Return the settings of the trace and logging extensions."""
    return (*map(_trace_setting, TRACE_SETTINGS), *map(_log_setting, LOG_SETTINGS))


def _trace_setting(name: str) -> Feature:
    if name in FIXED_TRACE_SETTINGS:
        return Feature(name, Support.REFUSED, "returned; a change is an error, as in Triton")
    return Feature(name, Support.NO_EFFECT, "kept and returned; nothing is traced by it")


def _log_setting(name: str) -> Feature:
    others = tuple(other for other, meant in OTHER_LOG_NAMES.items() if meant == name)
    match name:
        case "log_file":
            return Feature(name, Support.REFUSED, "returned; a change is an error, as in Triton")
        case "log_format":
            return Feature(name, Support.NO_EFFECT, "kept and returned")
    return Feature(name, note="the level of the log", other_names=others)


def metric_features() -> tuple[Feature, ...]:
    rows = sorted(map(_metric, _families()), key=lambda row: row.is_ours)
    return (*rows, *ABSENT_METRICS)


def label_features() -> tuple[Feature, ...]:
    """Return the label values of the replaced systems' families that are not names."""
    return tuple(
        Feature(f"{name}={value}", note=f"of {family.name}")
        for family in _families()
        if not _is_ours(family)
        for name, value in _labels(family)
    )


def _families() -> Iterable[Metric]:
    """Return the metrics of a server with a model of each kind of batching."""
    backend = EchoService()
    everything = MetricsConfig(histogram_latencies=True, summary_latencies=True)
    service = TritonService(backend, declarations=_DECLARATIONS, metrics=everything)
    collectors = [GatewayCollector(backend), *service.collectors()]
    return metrics_registry(backend, RequestMetrics(), collectors).collect()


def _metric(family: Metric) -> Feature:
    suffix = "_total" if family.type == "counter" and not family.name.startswith("nv_") else ""
    kind = "counter" if isinstance(family, ExactCounter) else family.type
    note = family.documentation.rstrip(".").replace(": ", ", ") if _is_ours(family) else ""
    return Feature(f"{family.name}{suffix}", note=note, form=kind, is_ours=_is_ours(family))


def _is_ours(family: Metric) -> bool:
    return family.name.startswith(_OURS)


def _labels(family: Metric) -> Iterable[tuple[str, str]]:
    labels = (label for sample in family.samples for label in sample.labels.items())
    return dict.fromkeys((name, value) for name, value in labels if name not in _FREE_LABELS)


_ABOUT = """\
This page is written by `make tables` from the tables of the code; a test compares it.

**works**: it has its original meaning, or the meaning in the note. **accepted without effect**: it
changes nothing, and this is logged once. **refused**: an error that names it; a refused metric is
absent. A refused tensor, field or key is accepted if its value has no effect (empty, false, 0).
Names that no replaced system has are marked as loraplex's own."""

_COMMANDS: Final[Mapping[str, Callable[..., None]]] = MappingProxyType(
    {
        "fill_template.py": fill_template,
        "hf_lora_convert.py": convert_lora,
        "extract_lora.py": extract_lora,
    }
)
"""Commands whose flags are their functions' parameters, by original."""
_BATCHING = "controls of sequence batching"


def sections() -> Iterator[Section]:
    for role, kind in KINDS.items():
        yield from _tensors(role, kind)
    yield Section("Parameters of a request", REQUEST_PARAMETERS)
    yield Section("Parameters of a tensor", TENSOR_PARAMETERS)
    yield Section(
        "Sampling parameters of the vLLM backend", tuple(row.feature for row in FIELDS.values())
    )
    yield Section(
        "Parameters of config.pbtxt: tensorrt_llm",
        tuple(row.feature for row in TENSORRT_LLM_PARAMETERS),
    )
    for role, rows in PART_PARAMETERS.items():
        if rows:
            title = f"Parameters of config.pbtxt: {role.value}"
            yield Section(title, tuple(row.feature for row in rows))
    yield Section(
        "Names of the templates",
        TEMPLATE_VARIABLES,
        "Variables that fill_template.py replaces in addition to the parameters.",
    )
    yield Section("Keys of model.json", tuple(row.feature for row in ENGINE_ARGS))
    yield Section("HTTP routes", route_features())
    yield Section("gRPC methods", rpc_features())
    yield Section("Headers", _HEADERS)
    yield Section("Trace and log settings", setting_features())
    yield Section("Extensions", tuple(map(Feature, EXTENSIONS)))
    yield Section(
        "Flags of tritonserver", (*OWN_FLAGS, *FLAGS), "As flags of `loraplex compat triton`."
    )
    yield Section("Flags of convert_checkpoint.py", tuple(row.feature for row in CHECKPOINT_FLAGS))
    yield Section(
        "Flags of trtllm-build and build.py",
        tuple(row.feature for row in BUILD_FLAGS),
        "A switch may stand alone, or with enable or disable; a plugin with a type or disable.",
    )
    yield Section("Flags of launch_triton_server.py", tuple(row.feature for row in LAUNCH_FLAGS))
    for original, command in _COMMANDS.items():
        yield Section(f"Flags of {original}", command_features(command))
    for program in PROGRAMS:
        yield Section(f"Flags of {program.original}", tuple(row.feature for row in program.flags))
    yield Section("Metrics", metric_features())
    yield Section("Labels of metrics", label_features())
    yield from NOT_SERVED


def triton_page() -> str:
    return page("Triton: what is supported", _ABOUT, sections())


def _tensors(role: Role, kind: ModelKind) -> Iterator[Section]:
    inputs = [row.feature for row in kind.inputs]
    if role is Role.TENSORRT_LLM:
        inputs += [Feature(name, Support.NO_EFFECT, _BATCHING) for name in sorted(IGNORED_INPUTS)]
    yield Section(f"Inputs of {role.value}", tuple(inputs))
    yield Section(f"Outputs of {role.value}", tuple(row.feature for row in kind.outputs))
