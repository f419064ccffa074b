"""Paged attention of a GPU: allocates and writes the KV storage, plans steps, attends."""

import functools

import torch

from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.cuda import attention_launch, attention_storage
from loraplex.kernels.cuda.attention_launch import AttentionLaunch, tile_queries
from loraplex.kernels.cuda.attention_plan import (
    CudaAttentionPlan,
    decode_tiles,
    device_rows,
    listed_rows,
    only_decodes,
)
from loraplex.kernels.cuda.flashinfer_attention import (
    FlashInferAttention,
    FlashInferPlan,
    load_flashinfer,
    refusal,
    unserved,
)
from loraplex.kernels.ops import (
    AttentionPlan,
    AttentionRules,
    AttentionShape,
    DeviceRows,
    RowLayout,
    Storage,
)
from loraplex.kernels.sizes import DEFAULT_SIZES, ProgramSizes

__all__ = ("CudaAttention", "CudaAttentionPlan")


class CudaAttention:
    """Paged attention by Triton, or by FlashInfer for the layers that it serves."""

    def __init__(
        self,
        device: torch.device,
        *,
        batch_invariant: bool,
        backend: str = "triton",
        accelerator: Accelerator | None = None,
        sizes: ProgramSizes = DEFAULT_SIZES,
    ) -> None:
        """batch_invariant: a token's result has the same bits whatever else is in the step, and
        however its prompt was cut into chunks, in tables of one width (of any up to 8192
        positions); slower.

        backend: "triton", "flashinfer", or "auto": flashinfer on a GPU if it is installed and
        serves the model. Both need the accelerator.
        """
        self._accelerator = accelerator
        self._device = device
        self._batch_invariant = batch_invariant
        self._backend = backend
        self._flashinfer: dict[AttentionShape, FlashInferAttention | None] = {}
        self._slots = attention_launch.num_program_slots(device, sizes.attention_programs)
        # At addresses that stay: a recorded step reads them.
        self._decode_tiles = functools.cache(lambda num_rows: decode_tiles(num_rows, device))
        self._slopes = functools.cache(
            lambda slopes: torch.tensor(slopes, dtype=torch.float32, device=device)
        )

    def allocate(self, num_blocks: int, shape: AttentionShape, dtype: torch.dtype) -> Storage:
        """Storage of one layer, zero; see attention_storage.py.

        Raises ConfigError if flashinfer was chosen and cannot serve it.
        """
        if shape not in self._flashinfer:
            self._flashinfer[shape] = self._loaded_flashinfer(shape, dtype)
        return attention_storage.allocate(num_blocks, shape, dtype, self._device)

    def write(
        self, storage: Storage, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """key, value [T, K, D], heads contiguous; slot_mapping [T], where -1 is written nowhere."""
        attention_storage.write(storage, key, value, slot_mapping)

    def plan(
        self, rows: RowLayout, shape: AttentionShape, rules: AttentionRules
    ) -> CudaAttentionPlan:
        slopes = rules.alibi_slopes
        assert len(slopes) in (0, shape.num_heads), "a slope for each head"
        on_device = device_rows(rows, self._device)
        plan = functools.partial(
            CudaAttentionPlan,
            shape,
            rules,
            on_device,
            on_device.block_tables.shape[1] * shape.block_size,
            slopes=self._slopes(slopes) if slopes else None,
            flashinfer=self._flashinfer_plan(rows, on_device, shape, rules),
        )
        if only_decodes(rows):
            if not self._batch_invariant:
                return plan(num_tokens=None)
            return plan(num_tokens=None, decode_rows=self._decode_tiles(len(on_device.seq_lens)))
        decode_rows, tiles = listed_rows(
            rows,
            tile_queries(shape, batch_invariant=self._batch_invariant),
            self._device,
            decode_as_tiles=self._batch_invariant,
        )
        return plan(num_tokens=rows.query_start_loc[-1], decode_rows=decode_rows, tiles=tiles)

    def attend(
        self,
        query: torch.Tensor,
        storage: Storage,
        plan: AttentionPlan,
        sink_logits: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [T, H, D], heads contiguous -> [T, H, D]; zeros for tokens that no row has.

        sink_logits [H], position_bias [H, 2 C + 1] (see Kernels) float32, contiguous. (Of rows
        without tokens FlashInfer makes anything.)
        """
        assert isinstance(plan, CudaAttentionPlan)
        assert position_bias is None or not plan.rules.alibi_slopes, "no layer has both"
        assert query.stride()[1:] == (query.shape[2], 1), "heads lie side by side"
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if plan.num_tokens is None:
            assert len(query) <= len(plan.rows.seq_lens), "row r computes token r"
        else:
            output[plan.num_tokens :].zero_()
        if plan.flashinfer is not None and self._by_flashinfer(
            query, plan, sink_logits, position_bias
        ):
            plan.flashinfer.attend(query, storage, output)
            return output
        launch = AttentionLaunch(
            *(query, attention_storage.stored_vectors(storage), plan, output),
            *(sink_logits, position_bias),
        )
        if self._batch_invariant:
            self._attend_invariant(launch)
        else:
            self._attend(launch)
        return output

    def size_of(
        self,
        query: torch.Tensor,
        storage: Storage,  # noqa: ARG002
        plan: AttentionPlan,
        sink_logits: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
    ) -> str | None:
        """Return the name of the size that decides `attend`; None: there is none."""
        assert isinstance(plan, CudaAttentionPlan)
        decodes = plan.only_decodes or plan.decode_rows is not None
        is_other = self._by_flashinfer(query, plan, sink_logits, position_bias)
        if self._batch_invariant or not decodes or is_other:
            return None
        return "attention_programs"

    @staticmethod
    def _by_flashinfer(
        query: torch.Tensor,
        plan: CudaAttentionPlan,
        sink_logits: torch.Tensor | None,
        position_bias: torch.Tensor | None,
    ) -> bool:
        library = plan.flashinfer
        is_served = library is not None and library.dtype == query.dtype
        return is_served and sink_logits is None and position_bias is None

    def _attend(self, launch: AttentionLaunch) -> None:
        plan = launch.plan
        if plan.only_decodes or plan.decode_rows is not None:
            attention_launch.decode(launch, plan.decode_rows, self._slots)
        if plan.tiles is not None:
            attention_launch.prefill_tiles(launch, plan.tiles)

    def _attend_invariant(self, launch: AttentionLaunch) -> None:
        plan = launch.plan
        if plan.decode_rows is not None:
            decode = plan.decode_rows
            if plan.only_decodes:
                decode = decode[: len(launch.query)]
            attention_launch.invariant_tiles(launch, decode, is_decode=True)
        if plan.tiles is not None:
            attention_launch.invariant_tiles(launch, plan.tiles, is_decode=False)

    def _loaded_flashinfer(
        self, shape: AttentionShape, dtype: torch.dtype
    ) -> FlashInferAttention | None:
        is_required = self._backend == "flashinfer"
        if not is_required and (self._backend != "auto" or self._device.type != "cuda"):
            return None
        reason = unserved(shape, dtype, batch_invariant=self._batch_invariant)
        if reason is None:
            assert self._accelerator is not None, "flashinfer needs it"
            return load_flashinfer(self._accelerator, shape, dtype, is_required=is_required)
        if is_required:
            raise refusal(reason)
        return None

    def _flashinfer_plan(
        self,
        rows: RowLayout,
        on_device: DeviceRows,
        shape: AttentionShape,
        rules: AttentionRules,
    ) -> FlashInferPlan | None:
        library = self._flashinfer.get(shape)
        return None if library is None else library.plan(rows, on_device, rules)
