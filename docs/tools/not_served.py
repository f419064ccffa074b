"""What replaced systems have and nothing here acts on: the only rows that no acting table has."""

from typing import Final

from loraplex.core.support import Feature, Section, Support

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
