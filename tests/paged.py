"""KV pools and flat batches for driving models without the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark_core.draft.backbone import DraftModel
from dspark_core.models.attention import FlatBatch, Segment
from dspark_core.models.decoder import TargetModel
from dspark_core.models.kv_cache import KVPool

PAGE_SIZE = 16  # small, so that even short sequences cross pages


def make_pool(model: TargetModel | DraftModel, num_pages: int, page_size: int = PAGE_SIZE) -> KVPool:
    """KV memory of a model."""
    config = model.config if isinstance(model, TargetModel) else model.config.decoder
    return KVPool.of(config, num_pages, page_size, model.dtype, model.device)


def slots_of(positions: Sequence[int], pages: Sequence[int], page_size: int = PAGE_SIZE) -> Tensor:
    """Where positions of one sequence lie."""
    return torch.tensor([pages[p // page_size] * page_size + p % page_size for p in positions], dtype=torch.int64)


def flat_batch(parts: Sequence[tuple[Sequence[int], int, Sequence[int]]], page_size: int = PAGE_SIZE) -> FlatBatch:
    """A flat batch of (token ids, position of the first, page table) of several requests."""
    ids: list[int] = []
    positions: list[int] = []
    slots, segments = [], []
    for tokens, start, pages in parts:
        span = range(start, start + len(tokens))
        segments.append(Segment(len(ids), len(tokens), start, pages))
        ids += tokens
        positions += span
        slots.append(slots_of(span, pages, page_size))
    return FlatBatch(torch.tensor(ids), torch.tensor(positions), torch.cat(slots), segments)


def greedy_ids(model: TargetModel, prompt: Sequence[int], count: int, page_size: int = PAGE_SIZE) -> list[int]:
    """`count` tokens of plain greedy decoding by a prepared target: the slow reference."""
    num_pages = -(-(len(prompt) + count) // page_size)
    pool, pages = make_pool(model, num_pages, page_size), list(range(num_pages))
    tokens, done = list(prompt), 0
    for _ in range(count):
        batch = flat_batch([(tokens[done:], done, pages)], page_size)
        done = len(tokens)
        tokens.append(int(model(batch, pool).logits[-1].argmax()))
    return tokens[len(prompt) :]
