"""Running the layers of a prepared model over a flat batch and paged memory: one interface, three ways.

`eager.EagerLayers` is the readable one, in torch operators, for every device and dtype; `compiled.CompiledLayers` the
fast one for float32 on a CPU; `graphed.GraphedLayers` the one for CUDA. All are tested against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from torch import Tensor, nn

from dspark_core.config import DecoderConfig
from dspark_core.models.attention import FlatBatch
from dspark_core.models.eager import EagerLayers
from dspark_core.models.kv_cache import KVPool
from dspark_core.models.layers import DecoderLayer
from dspark_core.models.linear import can_pack, pack_linear
from dspark_core.models.rope import Rotary
from dspark_core.settings import CpuWeights


class LayerRunner(Protocol):
    """Applies a stack of decoder layers.

    Attributes:
        exact: whether a row has the same bits whatever rows lie beside it.
        weight_bytes: memory of the weights by the kind of number they are stored as.
    """

    exact: bool
    weight_bytes: dict[str, int]

    def __call__(
        self, x: Tensor, batch: FlatBatch, pool: KVPool, tap: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs [N, D] of the last layer, and of the tapped ones side by side [N, m * D]; writes keys and values.

        Both may lie in memory that the next call of the same runner uses again.

        Args:
            x: [N, D] inputs of the first layer, which may be overwritten.
            batch: where the rows stand and what they see.
            tap: layer ids; -1 is the input.
        """
        ...

    def write_context(self, x: Tensor, positions: Tensor, slots: Tensor, pool: KVPool) -> None:
        """Write keys and values of injected rows [N, D] for every layer (DFlash); nothing attends."""
        ...


def make_runner(
    layers: nn.ModuleList, config: DecoderConfig, rotary: Rotary, weights: CpuWeights, *, with_context: bool = False
) -> LayerRunner:
    """The fastest runner for these layers; it takes their weights over, `layers` is empty afterwards if it packed them.

    Args:
        with_context: the runner's `write_context` will be called (drafts).

    Raises:
        CheckpointError: this kind of weights cannot be had here.
    """
    first = cast(DecoderLayer, layers[0]).self_attn.o_proj
    device, dtype = first.weight.device, first.weight.dtype
    if not can_pack(device, dtype):
        own = cast(list[DecoderLayer], list(layers))
        if weights not in ("exact", "float32"):
            pack_linear(first, weights=weights)  # says why not
        if device.type == "cuda":
            from dspark_core.models.graphed import GraphedLayers  # needs Triton

            return GraphedLayers(EagerLayers(own, rotary))
        return EagerLayers(own, rotary)
    from dspark_core.models.compiled import CompiledLayers  # needs Numba

    del first  # nobody else may hold on to weights that are packed
    return CompiledLayers(layers, config, rotary, weights, with_context=with_context)
