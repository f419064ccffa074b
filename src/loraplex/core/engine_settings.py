"""Settings of one model's engine: its weights, its memory and its steps."""

import functools
from types import MappingProxyType
from typing import Annotated, Final

import msgspec

from loraplex.core.rank_limits import RankLimits, rank_by_kind
from loraplex.core.scheduler_settings import SchedulingSettings
from loraplex.core.setting import Setting, fraction, matching, within
from loraplex.core.weight_precision import WeightPrecision

NO_CACHE: Final = "none"
"""Value of weights_cache_dir that keeps no packed weights. (A folder of that name is `./none`.)"""
MAX_GRAPH_BATCH_SIZE: Final = 256
"""Largest recorded step: in larger ones the cost of launching kernels is small compared with what
they compute."""

AUTO_DEVICE: Final = "auto"

_FLOATS: Final = ("auto", "float32", "float16", "bfloat16")
_FROM_CHECKPOINT: Final = (
    "is a format of checkpoints: a model that is quantised already is served as it is, so leave "
    "the setting out"
)
_ADVICE_ON_WEIGHTS: Final = {
    **dict.fromkeys(
        (
            *("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "bitsandbytes"),
            *("gguf", "mxfp4", "modelopt", "auto-round", "fbgemm_fp8", "q4_k_m", "q8_0"),
        ),
        _FROM_CHECKPOINT,
    ),
    **dict.fromkeys(("4bit", "nf4", "w4a16"), "use int4"),
    **dict.fromkeys(("8bit", "w8a8", "w8a16"), "use int8"),
}
_ADVICE_ON_KV: Final = dict.fromkeys(
    ("fp8", "fp8_e4m3", "fp8_e5m2", "int4", "q8_0", "q4_0"), "use int8 for a small KV cache"
)
_VLLM_FLOATS: Final = MappingProxyType({"half": "float16", "float": "float32"})
_engine = functools.partial(Setting, "Engine")
_memory = functools.partial(Setting, "Memory")
_adapters = functools.partial(Setting, "Adapters")


class EngineSettings(SchedulingSettings, frozen=True, kw_only=True):
    """What an engine process has to know in addition to the model's folder."""

    dtype: Annotated[
        str,
        _engine(
            "Data type of the model: auto, float32, float16 or bfloat16",
            "`auto` is the checkpoint's own type.",
            choices=_FLOATS,
            value_aliases=_VLLM_FLOATS,
        ),
    ] = "auto"
    quantization: Annotated[
        str,
        _engine(
            "Precision of the linear layers' weights: none, int8, int4 or, on a GPU, fp8",
            "The weights are quantised when they are loaded, and the log reports by how much they "
            "differ. With int4 and fp8 the lm_head is int8; embedding, norms and what "
            "chooses experts stay as they are. With int8 and int4 a CPU rounds the inputs of these "
            "layers to 8 bits, with a scale for each row and group. "
            "fp8 needs a GPU of compute capability 8.9 or more, and rounds the activations, too.",
            choices=tuple(WeightPrecision),
            advice=_ADVICE_ON_WEIGHTS,
        ),
    ] = "none"
    kv_dtype: Annotated[
        str,
        _engine(
            "Data type of the KV cache: auto, float32, float16, bfloat16 or int8",
            "`auto` is `dtype`. int8 takes about half the memory of bfloat16: each head's key and "
            "value of a token are stored as integers from -127 to 127 with one scale, rounded by "
            "at most half a step of 1/127 of the vector's largest element. The output of a request "
            "does not depend on other requests, as with any `kv_dtype`, but differs from the "
            "output with a float KV cache.",
            choices=(*_FLOATS, "int8"),
            advice=_ADVICE_ON_KV,
        ),
    ] = "auto"
    device: Annotated[
        str,
        _engine(
            "Device: auto, cpu, cuda or cuda:N",
            "`auto` is the first GPU if torch can use it, else the CPU; the log reports the choice "
            "and the reason. See [GPU](gpu.md).",
            check=matching(r"auto|cpu|cuda(:[0-9]+)?", "must be auto, cpu, cuda or cuda:N"),
        ),
    ] = AUTO_DEVICE
    attention_backend: Annotated[
        str,
        _engine(
            "Attention kernels on a GPU: auto, triton or flashinfer",
            "`auto` is flashinfer if it is installed and supports the model, else triton.",
            choices=("auto", "triton", "flashinfer"),
        ),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        _engine(
            "Batch-invariant kernels on a GPU: the same bits alone and in a batch; slower",
            "A CPU's kernels always are.",
        ),
    ] = False
    cuda_graphs: Annotated[
        bool,
        _engine(
            "Recording of decode steps as CUDA graphs at the start",
            aliases=("cuda_graph_mode", "use_cuda_graph"),
        ),
    ] = True
    cuda_graph_batch_sizes: Annotated[
        tuple[int, ...],
        _engine(
            "Numbers of sequences for which a step is recorded, such as 1,8,32",
            f"Each is at most {MAX_GRAPH_BATCH_SIZE}; those above `max_num_seqs` are left out. A "
            "step uses the next larger one.",
            default="1, 2, 4, every 8 to 64, every 16 to 256, and max_num_seqs",
            check=within(
                1, MAX_GRAPH_BATCH_SIZE, f"must be numbers from 1 to {MAX_GRAPH_BATCH_SIZE}"
            ),
            aliases=("cudagraph_capture_sizes",),
        ),
    ] = ()
    overlap: Annotated[
        bool | None,
        _engine(
            "Planning of the next step while one runs",
            "A sequence that ends is computed once more in vain.",
            default="on with a GPU, else off",
            aliases=("enable_trt_overlap",),
        ),
    ] = None
    num_threads: Annotated[
        int | None,
        _engine(
            "Number of threads of the arithmetic of each rank",
            default="torch's choice, divided by the number of ranks",
            minimum=1,
        ),
    ] = None
    tensor_parallel_size: Annotated[
        int,
        _engine(
            "Number of ranks that divide each layer among them",
            "See [Several ranks](ranks.md).",
            minimum=1,
            maximum=64,
            aliases=("tp_size",),
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        _engine(
            "Number of stages, each with a range of layers",
            "See [Several ranks](ranks.md).",
            minimum=1,
            maximum=64,
            aliases=("pp_size",),
        ),
    ] = 1
    executor: Annotated[
        str,
        _engine(
            "What starts the ranks: multiprocess (on this machine) or ray",
            "See [Several ranks](ranks.md).",
            choices=("multiprocess", "ray"),
        ),
    ] = "multiprocess"
    kernel_check: Annotated[
        str,
        _engine(
            "Whether a start checks the kernels against torch: auto, on or off",
            "`auto` checks on a GPU, once for each GPU, driver, version and kind of model. See "
            "[GPU](gpu.md#check-of-the-kernels).",
            choices=("auto", "on", "off"),
        ),
    ] = "auto"
    kernel_check_dir: Annotated[
        str,
        _engine(
            "Folder of the results of kernel checks",
            "Servers with the same folder check once.",
            default="kernels in state_dir if that is set, else loraplex/kernels in the user's "
            "cache directory",
        ),
    ] = ""
    weights_cache_dir: Annotated[
        str,
        _engine(
            "Folder of packed weights, for a fast next start; none: no cache",
            "The files have the form that the kernels read; all processes of a machine map the "
            "same ones.",
            default="weights in state_dir if that is set, else loraplex/weights in the user's "
            "cache directory",
        ),
    ] = ""
    weights_cache_bytes: Annotated[
        int,
        _engine(
            "Maximum size of the weights cache, over all models",
            "The files that were used longest ago are removed first.",
            minimum=1,
        ),
    ] = 64 << 30
    iteration_log: Annotated[
        str,
        _engine(
            "File for every input and plan of the scheduler, for `loraplex replay`",
            "**It contains the tokens of prompts and outputs.** One file per model.",
        ),
    ] = ""
    iteration_log_bytes: Annotated[
        int,
        _engine(
            "Maximum size of the iteration log",
            "Older parts are removed; what is left cannot be replayed.",
            minimum=1 << 20,
        ),
    ] = 1 << 30
    max_model_len: Annotated[
        int | None,
        _memory(
            "Maximum number of tokens of prompt and output together",
            "Less if the KV cache holds less.",
            default="the model's",
            minimum=1,
        ),
    ] = None
    memory_bytes: Annotated[
        int | None,
        _memory(
            "Device memory for weights, KV cache, adapters, and on a GPU steps and graphs",
            default="all of a GPU's; unknown on a CPU",
            minimum=1,
            aliases=("memory",),
        ),
    ] = None
    block_size: Annotated[int, _memory("Number of tokens in one KV block", minimum=1)] = 16
    kv_cache_bytes: Annotated[
        int | None,
        _memory(
            "Size of the KV cache, such as 4GiB",
            "See [Memory](#memory-sizes).",
            default="kv_cache_fraction of the memory, if that is known",
            minimum=1,
        ),
    ] = None
    kv_cache_fraction: Annotated[
        float,
        _memory(
            "Size of the KV cache, as a share of the memory that weights leave",
            "On a GPU, of what steps and graphs leave, too.",
            check=fraction,
            aliases=("kv_cache_free_gpu_mem_fraction",),
        ),
    ] = 0.9
    max_tokens_in_paged_kv_cache: Annotated[
        int | None,
        _memory(
            "Maximum size of the KV cache in tokens",
            "It is also the size where nothing else determines it.",
            minimum=1,
        ),
    ] = None
    kv_cache_host_memory_bytes: Annotated[
        int,
        _memory(
            "Host memory for the KV cache of preempted sequences; 0: it is computed again",
            minimum=0,
        ),
    ] = 0
    max_attention_window_size: Annotated[
        tuple[int, ...],
        _memory(
            "Number of newest positions that a position attends to; a list is by layer: 4096,512",
            "A list repeats itself until it has one entry for each layer.",
            default="the model's",
        ),
    ] = ()
    sink_token_length: Annotated[
        int,
        _memory("Number of first positions that are attended to besides a window", minimum=0),
    ] = 0
    max_lora_rank: Annotated[
        int,
        _adapters(
            "Maximum rank of an adapter",
            minimum=1,
            aliases=("lora_cache_max_adapter_size",),
        ),
    ] = 64
    max_lora_ranks: Annotated[
        dict[str, int],
        _adapters(
            "Maximum ranks by the kind of module, such as experts=16,attention=64",
            "Kinds are `attention`, `mlp` (dense feed-forward parts), `experts`, `shared_expert`, "
            "`router` and `ends` (embedding and lm_head). In a file it can be the table "
            "`[models.NAME.max_lora_ranks]`. With many experts one adapter of the largest ranks "
            "takes much memory, and the pool always has that much.",
            default="max_lora_rank for each kind",
            check=rank_by_kind,
        ),
    ] = msgspec.field(default_factory=dict)
    optimal_lora_rank: Annotated[
        int,
        _adapters(
            "Usual rank of an adapter, which determines the page size of the device pool",
            "An adapter of this rank on every module fills whole pages.",
            minimum=1,
            aliases=("lora_cache_optimal_adapter_size",),
        ),
    ] = 8
    lora_device_bytes: Annotated[
        int | None,
        _adapters(
            "Size of the device's adapter pool, such as 256MiB",
            "Never less than one adapter of the largest ranks. See [Memory](#memory-sizes).",
            default="lora_device_fraction of the memory, or by the host's",
            minimum=1,
        ),
    ] = None
    lora_device_fraction: Annotated[
        float,
        _adapters(
            "Size of the device's adapter pool, as a share of what weights and KV cache leave",
            "On a CPU, of `memory_bytes`.",
            check=fraction,
            aliases=("lora_cache_gpu_memory_fraction",),
        ),
    ] = 0.05
    lora_host_bytes: Annotated[
        int,
        _adapters(
            "Size of the host's adapter cache",
            minimum=1,
            aliases=("lora_cache_host_memory_bytes",),
        ),
    ] = 1 << 30
    lora_eviction_policy: Annotated[
        str,
        _adapters(
            "Which adapter leaves a full tier first: lru, lfu or cost",
            "`lru`: the one used longest ago; `lfu`: the one used least; `cost`: the one with the "
            "least load time times use per byte.",
            choices=("lru", "lfu", "cost"),
        ),
    ] = "lru"

    @property
    def rank_limits(self) -> RankLimits:
        """Maximum ranks of adapters."""
        return RankLimits(self.max_lora_rank, self.max_lora_ranks)
