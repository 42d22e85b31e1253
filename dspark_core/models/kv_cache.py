"""Device memory for keys and values: a pool of pages per model, addressed by one logical page table."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dspark_core.config import DecoderConfig
from dspark_core.devices import tensor_on
from dspark_core.settings import PAGE_SIZES

ALIGNMENT = 64  # bytes


class KVPool:
    """Keys and values of every layer of one model, in pages of token positions.

    Attributes:
        keys: [pages, layers, KV, head_dim, page_size]: a row for each dimension, so that a query's scores of many keys
            are made side by side.
        values: [pages, layers, KV, page_size, head_dim rounded up to a multiple of 16].

    A slot is `page * page_size + offset`. Who owns which page is the host's business (server.kv); target and
    draft have a pool each and share page numbers, so one page table serves both.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if page_size not in PAGE_SIZES:
            raise ValueError(f"page_size is {page_size}, expected one of {PAGE_SIZES}")
        self.page_size, self.num_pages = page_size, num_pages
        self.head_dim = head_dim
        # Zeroed: what was never written is masked, but 0 * NaN would still be NaN.
        heads = (num_pages, num_layers, num_kv_heads)
        self.keys = _zeros((*heads, head_dim, page_size), dtype, device)
        self.values = _zeros((*heads, page_size, _width(head_dim)), dtype, device)

    @classmethod
    def of(
        cls, config: DecoderConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVPool:
        """The pool that a decoder of this configuration needs."""
        return cls(
            num_layers=config.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=device,
        )

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows `keys`, `values` [N, KV, head_dim] at `slots` [N]."""
        pages, offsets = slots // self.page_size, slots % self.page_size
        self.keys[:, layer][pages, :, :, offsets] = keys
        self.values[:, layer][pages, :, offsets, : self.head_dim] = values

    def read(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """A copy of the keys and values of whole pages [P], each [KV, P * page_size, head_dim]."""
        keys, values = self.keys[pages, layer], self.values[pages, layer][..., : self.head_dim]
        return keys.permute(1, 0, 3, 2).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)

    def clear(self, pages: list[int]) -> None:
        """Zero pages that may hold NaN, before somebody else gets them."""
        index = tensor_on(self.keys.device, pages)
        self.keys.index_fill_(0, index, 0)
        self.values.index_fill_(0, index, 0)


def _width(head_dim: int) -> int:
    """Width of a stored value: whole vectors."""
    return -(-head_dim // 16) * 16


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take physical memory only where they are written; `torch.zeros` on a CPU touches every byte.

    Aligned as torch aligns its own tensors.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)


def bytes_per_page(*, num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Memory of one page of one model, keys and values."""
    return num_layers * page_size * num_kv_heads * (head_dim + _width(head_dim)) * dtype.itemsize
