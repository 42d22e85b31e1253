"""Where the host's decisions become tensors: one flat batch from the work of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_core.models.attention import Segment
from dspark_core.models.decoder import FlatBatch
from server.scheduler import Work


@dataclass(frozen=True)
class Layout:
    """A step's flat batch.

    Attributes:
        batch: for the target. Rows of one request are its pending tokens, then the admitted drafts.
        starts: first row of each work item.
        logit_rows: [M] rows that decide something: from each deciding request's last pending token on.
    """

    batch: FlatBatch
    starts: list[int]
    logit_rows: Tensor


def lay_out(work: Sequence[Work], draft_ids: Sequence[Sequence[int]], page_size: int, device: torch.device) -> Layout:
    """Flatten `work`; `draft_ids` holds the admitted drafts of its first items."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    segments: list[Segment] = []
    logit_rows: list[int] = []
    for index, item in enumerate(work):
        table = item.request.table
        drafts = draft_ids[index] if index < len(draft_ids) else ()
        tokens = [*item.request.tokens[table.kv_len : table.kv_len + item.num_tokens], *drafts]
        segments.append(Segment(len(ids), len(tokens), table.kv_len, table.pages))
        if item.decides:
            logit_rows += range(len(ids) + item.num_tokens - 1, len(ids) + len(tokens))
        span = range(table.kv_len, table.kv_len + len(tokens))
        ids += tokens
        positions += span
        slots += [table.pages[p // page_size] * page_size + p % page_size for p in span]
    token_ids, places, targets = (torch.tensor(values, device=device) for values in (ids, positions, slots))
    starts = [segment.start for segment in segments]
    rows = torch.tensor(logit_rows, dtype=torch.int64, device=device)
    return Layout(FlatBatch(token_ids, places, targets, segments), starts, rows)
