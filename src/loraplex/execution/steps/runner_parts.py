"""Parts of a runner."""

import dataclasses

import torch

from loraplex.core.plan import Capacity
from loraplex.execution.adapters.bank import AdapterBank
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.adapters.rank_share import AdapterCutter
from loraplex.execution.steps.image_rows import ImageEncoder
from loraplex.execution.steps.kv_cache import KVCache
from loraplex.execution.steps.stages import StageLinks, StageSampler
from loraplex.execution.steps.text_inputs import TextEncoder
from loraplex.execution.vector_layers import VectorLayer
from loraplex.execution.weights.background_store import BackgroundStore
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.ops import Kernels
from loraplex.models.decoder import Decoder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """One model on one device; execution.loading makes them for a model folder."""

    kernels: Kernels
    decoder: Decoder
    kv_cache: KVCache
    adapter_bank: AdapterBank
    host_adapters: HostAdapters
    sampler: StageSampler
    capacity: Capacity
    device: torch.device
    adapter_cutter: AdapterCutter | None = None
    """None: this is the only rank, which holds adapters whole."""
    links: StageLinks | None = None
    """None: there are no other stages."""
    accelerator: Accelerator | None = None
    """That of the kernels. None: torch alone drives the device, and steps run within `launch`."""
    encoder: ImageEncoder | None = None
    """Encoder of images, where capacity.images is set: on the first stage, and on each rank."""
    text_encoder: TextEncoder | None = None
    """Encoder of texts, where capacity.longest_encoder_input is set: on each rank."""
    vector_layers: tuple[VectorLayer, ...] = ()
    """Layers after the pooling, on each rank of the last stage."""
    recorded_sizes: tuple[int, ...] = ()
    """Numbers of tokens, ascending, of which steps that only decode are recorded."""
    storing: BackgroundStore | None = None
    """Work that writes the packed weights for the next start; None: there is none."""
