"""Where the host's decisions become tensors, one flat batch from the work of a step, and results become lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_core.devices import tensor_on
from dspark_core.models.attention import FlatBatch, Segment
from server.scheduler import Work


@dataclass(frozen=True)
class Layout:
    """A step's flat batch.

    Attributes:
        batch: for the target. Rows of one request are its pending tokens, then the admitted drafts.
        starts: first row of each work item.
        slots: of all rows, as the batch has them.
        logit_rows: [M] rows whose scores are wanted. First those that decide something, from each deciding request's
            last pending token on; then those of prompts whose log-probabilities are asked for.
        num_deciding: how many of them decide.
        prompt_rows: work item and number of rows of each such prompt, in order.
    """

    batch: FlatBatch
    starts: list[int]
    slots: list[int]
    logit_rows: Tensor
    num_deciding: int
    prompt_rows: list[tuple[int, int]]


def lay_out(
    work: Sequence[Work], draft_ids: Tensor, verify_lens: Sequence[int], page_size: int, device: torch.device
) -> Layout:
    """Flatten `work`; the first items verify `verify_lens` of their drafts, rows of `draft_ids` [R, K].

    The drafts go from the device to the device: the host need not know them yet.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    segments: list[Segment] = []
    logit_rows: list[int] = []
    scored: list[int] = []
    prompt_rows: list[tuple[int, int]] = []
    drafted: list[tuple[int, int, int]] = []  # flat row, request, slot
    for index, item in enumerate(work):
        table = item.request.table
        num_drafts = verify_lens[index] if index < len(verify_lens) else 0
        start, end = len(ids), len(ids) + item.num_tokens + num_drafts
        segments.append(Segment(start, end - start, table.kv_len, table.pages))
        if item.decides:
            logit_rows += range(start + item.num_tokens - 1, end)
        if count := item.num_scored:
            scored += range(start, start + count)
            prompt_rows.append((index, count))
        drafted += [(start + item.num_tokens + slot, index, slot) for slot in range(num_drafts)]
        span = range(table.kv_len, table.kv_len + end - start)
        ids += [*item.request.tokens[table.kv_len : table.kv_len + item.num_tokens], *[0] * num_drafts]
        positions += span
        slots += [table.pages[p // page_size] * page_size + p % page_size for p in span]
    token_ids, places, targets = tensor_on(device, [ids, positions, slots])
    if drafted:
        rows, requests, block_slots = tensor_on(device, list(zip(*drafted, strict=True)))
        token_ids[rows] = draft_ids[requests, block_slots]
    starts = [segment.start for segment in segments]
    wanted, batch = tensor_on(device, logit_rows + scored), FlatBatch(token_ids, places, targets, segments)
    return Layout(batch, starts, slots, wanted, len(logit_rows), prompt_rows)


def read_back(parts: Sequence[Tensor], *, drafted: int) -> list[list[int]]:
    """The step's one copy of results from the device. (Confidence that decides what is verified was copied before.)

    Args:
        parts: int64: of `drafted` requests, if there are any, their drafts, how many of them stand, and the token after
            them; of the others, if there are any, their tokens.

    Returns:
        The tokens that each request gets.
    """
    if parts and parts[0].device.type != "cpu":
        parts = torch.cat([*parts]).cpu().split([len(part) for part in parts])
    results = [part.tolist() for part in parts]
    emitted = []
    if drafted:
        draft_ids, accepted, following, *results = results
        slots = len(draft_ids) // drafted
        for row, (count, token) in enumerate(zip(accepted, following, strict=True)):
            emitted.append([*draft_ids[row * slots : row * slots + count], token])
    for plain in results:
        emitted += [[token] for token in plain]
    return emitted
