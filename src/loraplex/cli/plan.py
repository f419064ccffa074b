"""`loraplex plan`: the memory of a model and its adapters, and the adapters that do not fit."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from loraplex.cli.options import errors_to_exit_code
from loraplex.cli.serve import build_config
from loraplex.cli.settings_flags import with_settings
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.counts import counted

if TYPE_CHECKING:
    from loraplex.app.plan import MemoryPlan, PlannedAdapter
    from loraplex.serving.model_memory import CacheGroupMemory, KVMemory


@with_settings(
    *("dtype", "kv_dtype", "quantization", "device", "memory_bytes", "max_model_len"),
    *("max_num_seqs", "max_num_batched_tokens", "block_size", "cuda_graphs"),
    *("cuda_graph_batch_sizes", "kv_cache_bytes", "kv_cache_fraction"),
    *("max_tokens_in_paged_kv_cache", "kv_cache_host_memory_bytes"),
    *("max_attention_window_size", "sink_token_length", "max_lora_rank", "max_lora_ranks"),
    "adapter_base_check",
    *("optimal_lora_rank", "lora_device_bytes", "lora_device_fraction", "lora_host_bytes"),
)
def plan(
    model: Annotated[str, typer.Argument(help="Hugging Face folder or hub id.")],
    adapters: Annotated[
        list[str] | None,
        typer.Option(help="Adapter, or folder with adapters at any depth; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **settings: Any,
) -> None:
    """Estimate the memory of a model and its adapters: no server is started, no weights are read.

    Exit code 2: an adapter cannot be served.
    """
    with errors_to_exit_code():
        (config,) = build_config(model, None, None, [], [], settings).models.values()
        from loraplex.app.plan import plan_memory  # noqa: PLC0415 - torch

        found = plan_memory(config, adapters or [])
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        _print_plan(found)
    if any(adapter.problem for adapter in found.adapters.adapters):
        raise typer.Exit(2)


def _print_plan(plan: "MemoryPlan") -> None:
    memory, device = plan.memory, plan.memory.device
    print(f"{plan.model}")
    print(
        f"  device          {plan.device}, {plan.dtype}; a step has at most {plan.max_num_seqs} "
        f"sequences and {plan.max_num_batched_tokens} tokens"
    )
    print(f"  weights         {readable_bytes(memory.weights_bytes)}")
    if memory.workspace_bytes:
        print(f"  steps           {readable_bytes(memory.workspace_bytes)}, estimated")
        print(f"  recorded steps  {readable_bytes(memory.graph_bytes)}, estimated")
    print(
        f"  KV cache        {readable_bytes(memory.kv.num_bytes)}: {memory.kv.tokens} tokens in "
        f"{memory.kv.blocks} blocks{_on_host(memory.kv)}"
    )
    for group in memory.kv.groups:
        print(f"{'':18}{_described(group)}")
    print(
        f"  adapters        {readable_bytes(device.num_bytes)} on the device: {device.pages} pages "
        f"of {readable_bytes(device.page_bytes)}; tables {readable_bytes(device.table_bytes)}"
    )
    for fit in device.fits:
        pages = counted(fit.pages, "page")
        print(f"{'':18}{fit.holds} of rank {fit.rank} on all modules, {pages} each")
    total = memory.weights_bytes + memory.workspace_bytes + memory.graph_bytes
    total += memory.kv.num_bytes + device.num_bytes + device.table_bytes
    print(f"  device, in all  {readable_bytes(total)}")
    print(f"  adapters        {readable_bytes(memory.host.num_bytes)} on the host")
    if plan.adapters.adapters:
        _print_adapters(plan)


def _described(group: "CacheGroupMemory") -> str:
    """Return what the blocks of a cache group are. A sequence holds one to three states."""
    if group.state_tokens:
        size = readable_bytes(group.block_bytes)
        kind = f"a state of {size} every {group.state_tokens} tokens"
        return f"{group.blocks} states{_on_host(group)} in layers with {kind}"
    window = group.attention_window
    layers = "without a window" if window is None else f"with a window of {window}"
    if group.is_of_encoder:
        layers = "of cross attention"
    return f"{group.blocks} blocks{_on_host(group)} in layers {layers}"


def _on_host(kv: "KVMemory | CacheGroupMemory") -> str:
    return f", {kv.host_blocks} more on the host" if kv.host_blocks else ""


def _print_adapters(plan: "MemoryPlan") -> None:
    served = [adapter for adapter in plan.adapters.adapters if not adapter.problem]
    for adapter in plan.adapters.adapters:
        print(f"  {adapter.name}: {adapter.problem or _size_of(adapter)}")
    print(
        f"{len(served)} of {len(plan.adapters.adapters)} adapters can be served; any "
        f"{plan.adapters.fit_device} of them fit on the device at once, any "
        f"{plan.adapters.fit_host} on the host"
    )


def _size_of(adapter: "PlannedAdapter") -> str:
    pages = counted(adapter.device_pages, "page")
    return (
        f"rank {adapter.rank}, {pages} on the device "
        f"({readable_bytes(adapter.device_bytes)}), {readable_bytes(adapter.host_bytes)} on the "
        "host"
    )
