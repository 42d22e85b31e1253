"""Device memory for keys and values: a pool of pages per model, addressed by one logical page table."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dspark_core.config import DecoderConfig

ALIGNMENT = 64  # bytes
PAGE_SIZES = (16, 32, 64, 128)  # whole pages can make the key counts that attention.padded_keys needs


class KVPool:
    """Keys and values of every layer of one model, in pages of token positions.

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
        # Zeroed: padding reads of never-written slots are masked, but 0 * NaN would still be NaN.
        shape = (num_layers, num_pages * page_size, num_kv_heads, head_dim)
        self.keys, self.values = (_zeros(shape, dtype, device) for _ in range(2))

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
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def read(self, layer: int, pages: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of whole pages, each [B, KV, L, head_dim].

        Args:
            pages: consecutive pages of one sequence (a view, nothing is copied, B = 1), or page numbers [B, P].
        """
        return self._read(self.keys[layer], pages), self._read(self.values[layer], pages)

    def _read(self, pool: Tensor, pages: slice | Tensor) -> Tensor:
        if isinstance(pages, slice):
            rows = pool[pages.start * self.page_size : pages.stop * self.page_size].unsqueeze(0)
        else:
            paged = pool.view(self.num_pages, self.page_size, *pool.shape[1:])
            rows = paged[pages].flatten(1, 2)
        return rows.transpose(1, 2)

    def clear(self, pages: list[int]) -> None:
        """Zero pages that may hold NaN, before somebody else gets them."""
        index = torch.tensor(pages, device=self.keys.device)
        for pool in (self.keys, self.values):
            pool.view(pool.shape[0], self.num_pages, self.page_size, *pool.shape[2:])[:, index] = 0


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take physical memory only where they are written; `torch.zeros` on a CPU touches every byte.

    Aligned as torch aligns its own tensors: a copy of a page must give a GEMM the same alignment as the page.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)


def bytes_per_page(*, num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Memory of one page of one model, keys and values."""
    return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize
