"""The backend of a CPU: every op natively."""

from collections.abc import Callable, Hashable, Sequence

import torch

from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.native.attention import NativeAttention, NativeAttentionPlan
from loraplex.kernels.native.channel import SharedMemoryChannel
from loraplex.kernels.native.convolution import NativeConvolution
from loraplex.kernels.native.elementwise import NativeElementwise
from loraplex.kernels.native.experts import NativeExperts
from loraplex.kernels.native.gguf import NativeGguf
from loraplex.kernels.native.latent import NativeLatent
from loraplex.kernels.native.library import NativeLibrary, ThreadPool
from loraplex.kernels.native.linear import (
    PACKED_LAYOUT,
    NativeLinear,
    join_linear,
    linear_parts,
)
from loraplex.kernels.native.lora import NativeLora
from loraplex.kernels.native.program import Recorder, StepProgram
from loraplex.kernels.native.recurrence import NativeRecurrence
from loraplex.kernels.native.sampling import NativeSampling
from loraplex.kernels.ops import Parameter
from loraplex.kernels.reference import ReferenceKernels


class NativeKernels(ReferenceKernels):
    """Implements `Kernels` for tensors on the host: binds each op to its native function.

    A row's result has the same bits alone and in company, on any number of threads.
    """

    packed_layout = PACKED_LAYOUT

    def __init__(
        self, library: NativeLibrary, num_threads: int, channel: SharedMemoryChannel | None = None
    ) -> None:
        """num_threads: counting the one that calls. channel: to other ranks; None: none."""
        super().__init__(torch.device("cpu"), channel)
        self._pool = ThreadPool(library, num_threads)
        self._recorder = Recorder(library)
        self._programs: dict[Hashable, StepProgram | None] = {}
        self._bind_unrecorded(library)
        self._bind_recorded(
            library.watched(self._recorder.watch, self._recorder.output),
            None if channel is None else channel.address,
        )

    def _bind_unrecorded(self, library: NativeLibrary) -> None:
        """Bind what is not in a decoder's step."""
        # A thread and a pool of its own.
        apart = NativeLinear(library, ThreadPool(library, 1))
        self.linear_apart, self.squared_row_norms = apart.apply_apart, apart.squared_row_norms
        self.linear_parts, self.join_linear = linear_parts, join_linear
        self.pack_blocks = NativeGguf(library, self._pool).pack
        sampling = NativeSampling(library, self._pool)
        self.argmax = sampling.argmax
        self.draw_tokens = sampling.draw_tokens
        self.top_logprobs = sampling.top_logprobs
        self.apply_bitmask = sampling.apply_bitmask

    def _bind_recorded(self, watched: NativeLibrary, channel: int | None) -> None:
        """Bind the ops of a step. Of an unwatched library they would leave steps without programs.

        channel: the address of a loraplex_channel.
        """
        linear = NativeLinear(watched, self._pool, channel)
        self.pack_linear, self.takes_quantized = linear.pack, linear.takes
        self.linear, self.grouped_linear = linear.apply, linear.apply_grouped
        self.weight_rows = linear.rows
        self.gather_columns = linear.gather_columns
        elementwise = NativeElementwise(watched, self._pool)
        self.take_rows = elementwise.take_rows
        self.rms_norm, self.add_rms_norm = elementwise.rms_norm, elementwise.add_rms_norm
        self.layer_norm, self.add_layer_norm = elementwise.layer_norm, elementwise.add_layer_norm
        self.add, self.scale = elementwise.add, elementwise.scale
        self.multiply = elementwise.multiply
        self.rotary = elementwise.rotary
        self.gate, self.activate = elementwise.gate, elementwise.activate
        self.xielu = elementwise.xielu
        experts = NativeExperts(watched, self._pool)
        self.route, self.combine_experts = experts.route, experts.combine
        attention = NativeAttention(watched, self._pool)
        self.allocate_kv, self.write_kv = attention.allocate, attention.write
        self.plan_attention, self.paged_attention = attention.plan, attention.attend
        self.plan_latent_attention = attention.plan
        recurrence = NativeRecurrence(watched, self._pool)
        self.delta_rule = recurrence.delta_rule
        self.ssd = recurrence.ssd
        self.gated_rms_norm = recurrence.gated_rms_norm
        self.sigmoid_gate = recurrence.sigmoid_gate
        self.causal_conv = NativeConvolution(watched, self._pool).apply
        self._lora = NativeLora(watched, self._pool, channel)
        self.add_lora, self.add_expert_lora = self._lora.add, self._lora.add_experts
        latent = NativeLatent(watched, self._pool, self._lora.step_address)
        self.write_latent, self.latent_attention = latent.write, latent.attend
        self.add_heads_lora, self.scale_heads = latent.add_lora, latent.scale

    def repeat(
        self,
        key: Hashable,
        parameters: Sequence[Parameter],
        compute: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        addresses = [address for parameter in parameters for address in self._addresses(parameter)]
        if key not in self._programs:
            result, self._programs[key] = self._recorder.record(addresses, compute)
            return result
        program = self._programs[key]
        return compute() if program is None else program.run(addresses)

    @property
    def lora_ns(self) -> int:
        return self._pool.lora_ns

    def forget_recorded(self) -> None:
        self._programs.clear()

    def _addresses(self, parameter: Parameter) -> tuple[int, ...]:
        match parameter:
            case torch.Tensor():
                return (parameter.data_ptr(),)
            case NativeAttentionPlan():
                return (parameter.address,)
            case LoraBatch():
                return (self._lora.step_address(parameter),)
            case tuple():
                return tuple(tensor.data_ptr() for tensor in parameter)
        assert parameter is None, f"no kernel reads a {type(parameter).__name__}"
        return (0,)
