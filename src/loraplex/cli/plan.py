"""`loraplex plan`: what a model and its adapters would take, and what would not fit."""

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from loraplex.cli.options import errors_to_exit_code
from loraplex.cli.output import readable_bytes
from loraplex.cli.serve import build_config

if TYPE_CHECKING:
    from loraplex.app.plan import MemoryPlan, PlannedAdapter
    from loraplex.serving.model_memory import ModelMemory


def plan(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder or hub id.")],
    adapters: Annotated[
        list[str] | None,
        typer.Option(help="An adapter, or a folder below which they are; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Numbers for programs.")] = False,
    dtype: Annotated[str | None, typer.Option(help="As for serve.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="As for serve.")] = None,
    quantization: Annotated[str | None, typer.Option(help="As for serve.")] = None,
    device: Annotated[
        str | None, typer.Option(help="As for serve; with --memory it need not be here.")
    ] = None,
    memory_bytes: Annotated[
        str | None, typer.Option("--memory-bytes", "--memory", help="Of the device.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="As for serve.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="As for serve.")] = None,
    block_size: Annotated[int | None, typer.Option(help="As for serve.")] = None,
    cuda_graphs: Annotated[bool | None, typer.Option(help="As for serve.")] = None,
    cuda_graph_batch_sizes: Annotated[str | None, typer.Option(help="As for serve.")] = None,
    kv_cache_bytes: Annotated[str | None, typer.Option(help="As for serve.")] = None,
    kv_cache_fraction: Annotated[
        float | None,
        typer.Option("--kv-cache-fraction", "--kv-cache-free-gpu-mem-fraction", help="As there."),
    ] = None,
    max_tokens_in_paged_kv_cache: Annotated[int | None, typer.Option(help="As for serve.")] = None,
    kv_cache_host_memory_bytes: Annotated[str | None, typer.Option(help="As for serve.")] = None,
    max_attention_window_size: Annotated[str | None, typer.Option(help="As for serve.")] = None,
    sink_token_length: Annotated[int | None, typer.Option(help="As for serve.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="As for serve.")] = None,
    max_lora_rank: Annotated[
        int | None,
        typer.Option("--max-lora-rank", "--lora-cache-max-adapter-size", help="As there."),
    ] = None,
    optimal_lora_rank: Annotated[
        int | None,
        typer.Option("--optimal-lora-rank", "--lora-cache-optimal-adapter-size", help="As there."),
    ] = None,
    lora_device_bytes: Annotated[str | None, typer.Option(help="As for serve.")] = None,
    lora_device_fraction: Annotated[
        float | None,
        typer.Option(
            "--lora-device-fraction", "--lora-cache-gpu-memory-fraction", help="As there."
        ),
    ] = None,
    lora_host_bytes: Annotated[
        str | None,
        typer.Option("--lora-host-bytes", "--lora-cache-host-memory-bytes", help="As there."),
    ] = None,
) -> None:
    """Say what a model and its adapters would take: no server is started, no weights are read.

    Exit code 2: some adapter could not be served.
    """
    flags = {
        key: value
        for key, value in locals().items()
        if value is not None and key not in {"model", "adapters", "as_json"}
    }
    with errors_to_exit_code():
        (settings,) = build_config(model, None, None, [], [], flags).models.values()
        from loraplex.app.plan import plan_memory  # noqa: PLC0415 - torch

        found = plan_memory(settings, adapters or [])
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        _print_plan(found)
    if any(adapter.problem for adapter in found.adapters.adapters):
        raise typer.Exit(2)


def _print_plan(plan: "MemoryPlan") -> None:
    memory, device = plan.memory, plan.memory.device
    print(f"{plan.model}")
    print(f"  weights         {readable_bytes(memory.weights_bytes)}")
    if memory.workspace_bytes:
        print(f"  steps           {readable_bytes(memory.workspace_bytes)}, estimated")
        print(f"  recorded steps  {readable_bytes(memory.graph_bytes)}, estimated")
    print(
        f"  KV cache        {readable_bytes(memory.kv.num_bytes)}: {memory.kv.tokens} tokens in "
        f"{memory.kv.blocks} blocks{_on_host(memory)}"
    )
    print(
        f"  adapters        {readable_bytes(device.num_bytes)} on the device: {device.pages} pages "
        f"of {readable_bytes(device.page_bytes)}"
    )
    for fit in device.fits:
        print(f"{'':18}{fit.holds} of rank {fit.rank} on all modules, {fit.pages} pages each")
    total = memory.weights_bytes + memory.workspace_bytes + memory.graph_bytes
    total += memory.kv.num_bytes + device.num_bytes
    print(f"  device, in all  {readable_bytes(total)}")
    print(f"  adapters        {readable_bytes(memory.host.num_bytes)} on the host")
    if plan.adapters.adapters:
        _print_adapters(plan)


def _on_host(memory: "ModelMemory") -> str:
    return f", {memory.kv.host_blocks} more on the host" if memory.kv.host_blocks else ""


def _print_adapters(plan: "MemoryPlan") -> None:
    served = [adapter for adapter in plan.adapters.adapters if not adapter.problem]
    for adapter in plan.adapters.adapters:
        print(f"  {adapter.name}: {adapter.problem or _room_of(adapter)}")
    print(
        f"{len(served)} of {len(plan.adapters.adapters)} adapters can be served; any "
        f"{plan.adapters.fit_device} of them fit on the device at once, any "
        f"{plan.adapters.fit_host} on the host"
    )


def _room_of(adapter: "PlannedAdapter") -> str:
    pages = "page" if adapter.device_pages == 1 else "pages"
    return (
        f"rank {adapter.rank}, {adapter.device_pages} {pages} on the device "
        f"({readable_bytes(adapter.device_bytes)}), {readable_bytes(adapter.host_bytes)} on the "
        "host"
    )
