"""Drafting: the serving path computes what training computes, and nothing of a block outlives its round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark_core.adjustments import RowSource
from dspark_core.checkpoint.load import load_draft, load_target
from dspark_core.draft.backbone import DraftModel
from dspark_core.draft.drafter import DraftBlock, Drafter, Drafts
from dspark_core.draft.packed_forward import forward_windows
from dspark_core.sampler import Round
from dspark_core.sampling import SamplingParams
from dspark_core.windows import make_windows
from tests.paged import PAGE_SIZE, make_pool, slots_of
from tests.tiny import tiny_draft_folder, tiny_target_folder

K, LENGTH = 5, 48
# float32: the training path pads no keys and packs no weights, so sums run in another order.
TOLERANCE = 1e-5

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "vanilla": ("vanilla", {}),
    "gated": ("gated", {}),
    "rnn": ("rnn", {}),
    "none": ("none", {}),
    "confidence on hidden alone": ("vanilla", {"confidence_head_with_markov": False}),
    "no confidence head": ("rnn", {"enable_confidence_head": False}),
}


@pytest.fixture(params=KINDS)
def models(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[DraftModel, DraftModel]:
    """The same draft twice: as training uses it, and prepared for serving."""
    return load_twice(tmp_path, request.param)


def load_twice(tmp_path: Path, kind: str) -> tuple[DraftModel, DraftModel]:
    head, overrides = KINDS[kind]
    target_folder = tiny_target_folder(tmp_path)
    folder = tiny_draft_folder(tmp_path, target_folder, head, K, **overrides)
    target = load_target(target_folder)
    training, serving = load_draft(folder, target), load_draft(folder, target)
    serving.prepare(max_positions=LENGTH + K)
    return training, serving


@pytest.fixture
def serving(tmp_path: Path) -> DraftModel:
    return load_twice(tmp_path, "rnn")[1]


class Greedy:
    """Chooses the most likely token, and keeps the logits it was given."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, slot: int, logits: Tensor, draft_ids: Tensor) -> Tensor:
        assert slot == len(self.logits) == draft_ids.shape[1]
        self.logits.append(logits)
        return logits.argmax(-1)


def absorb(drafter: Drafter, features: Tensor, span: range, pages: Sequence[int]) -> None:
    if span:
        drafter.absorb(features[span.start : span.stop], torch.tensor(span), slots_of(span, pages))


def test_serving_computes_what_training_computes(models: tuple[DraftModel, DraftModel]) -> None:
    training, serving = models
    ids = torch.randint(2, 258, (1, LENGTH))
    features = torch.randn(1, LENGTH, 2 * 32)
    anchors = torch.tensor([[0, 1, 15, 16, 30, 43]])
    windows = make_windows(ids, torch.ones(1, LENGTH), anchors, torch.ones_like(anchors).bool(), K)
    with torch.no_grad():
        expected = forward_windows(training, features, windows, ids.gather(1, anchors))
    per_request = -(-(LENGTH + K) // PAGE_SIZE)
    drafter = Drafter(serving, make_pool(serving, 6 * per_request))
    tables = [list(range(n, 6 * per_request, 6)) for n in range(6)]
    blocks, logits = [], []
    for anchor, pages in zip(anchors[0].tolist(), tables, strict=True):
        absorb(drafter, features[0], range(anchor), pages)
        blocks.append(DraftBlock(int(ids[0, anchor]), anchor, K, pages))

    def teacher(slot: int, scores: Tensor, _: Tensor) -> Tensor:
        logits.append(scores)
        return windows.previous_ids[0, :, min(slot + 1, K - 1)]

    drafts = drafter.draft(blocks, teacher)
    with torch.no_grad():
        expected_logits = expected.logits(training)[0]
    assert float((torch.stack(logits, 1) - expected_logits).abs().max()) < TOLERANCE
    if expected.confidence_logits is None:
        assert drafts.confidence_logits is None
    else:
        assert drafts.confidence_logits is not None
        assert float((drafts.confidence_logits - expected.confidence_logits[0]).abs().max()) < TOLERANCE


@pytest.mark.parametrize("accepted", [0, 2, K])
def test_block_keys_are_dead_after_the_round(accepted: int, serving: DraftModel) -> None:
    """Case A10: the next block is the one that a drafter without any history computes."""
    features, anchor, pages = torch.randn(LENGTH, 64), 13, [2, 0, 3]
    used = Drafter(serving, make_pool(serving, 4))
    absorb(used, features, range(anchor), pages)
    used.draft([DraftBlock(7, anchor, K, pages)], Greedy())
    after = anchor + 1 + accepted
    absorb(used, features, range(anchor, after), pages)
    fresh = Drafter(serving, make_pool(serving, 4))
    absorb(fresh, features, range(after), pages)
    block, outputs = [DraftBlock(9, after, K, pages)], []
    for drafter in (used, fresh):
        choose = Greedy()
        drafts = drafter.draft(block, choose)
        outputs.append((torch.stack(choose.logits), drafts.draft_ids, drafts.confidence_logits))
    for found, expected in zip(*outputs, strict=True):
        assert found is not None
        assert torch.equal(found, expected)


def test_context_reaches_to_the_token_before_the_anchor(serving: DraftModel) -> None:
    """Every committed token counts, the anchor's own slot and what lies behind do not."""
    features, anchor, pages = torch.randn(LENGTH, 64), 20, [0, 1, 2]

    def logits(changed: int) -> Tensor:
        drafter = Drafter(serving, make_pool(serving, 3))
        other = features.clone()
        other[changed] += 1
        absorb(drafter, other, range(40), pages)
        choose = Greedy()
        drafter.draft([DraftBlock(7, anchor, K, pages)], choose)
        return choose.logits[0]

    unchanged = logits(39)
    for position in (0, anchor - 1):
        assert not torch.equal(logits(position), unchanged), f"position {position} is context"
    for position in (anchor, anchor + 1, anchor + K - 1, anchor + K):
        assert torch.equal(logits(position), unchanged), f"position {position} is not"


def test_blocks_of_different_sizes_share_a_batch(serving: DraftModel) -> None:
    """Near the end of a request fewer slots are drafted; neighbours are not disturbed."""
    features = torch.randn(LENGTH, 64)
    tables = [[2 * n, 2 * n + 1] for n in range(5)]
    drafter = Drafter(serving, make_pool(serving, 10))
    blocks = [
        DraftBlock(10 + n, position, num_slots, tables[n])
        for n, (position, num_slots) in enumerate([(3, K), (31, 1), (29, 3), (0, 2), (20, K)])
    ]
    for block in blocks:
        absorb(drafter, features, range(block.position), block.pages)
    together = drafter.draft(blocks, Greedy())
    assert together.draft_ids.shape == (5, K)
    for row, block in enumerate(blocks):
        alone: Drafts = drafter.draft([block], Greedy())
        own = block.num_slots
        assert alone.draft_ids.shape == (1, own)
        assert torch.equal(together.draft_ids[row, :own], alone.draft_ids[0])
        assert together.confidence_logits is not None
        assert alone.confidence_logits is not None
        assert torch.allclose(together.confidence_logits[row, :own], alone.confidence_logits[0], atol=TOLERANCE)


def test_fewer_slots_are_a_shorter_block_of_masks(tmp_path: Path) -> None:
    training, serving = load_twice(tmp_path, "vanilla")
    ids, features = torch.randint(2, 258, (1, LENGTH)), torch.randn(1, LENGTH, 64)
    anchor = torch.tensor([[20]])
    windows = make_windows(ids, torch.ones(1, LENGTH), anchor, torch.ones(1, 1).bool(), 2)
    with torch.no_grad():
        expected = forward_windows(training, features, windows, ids[:, [20]]).logits(training)[0, 0, 0]
    drafter, choose = Drafter(serving, make_pool(serving, 2)), Greedy()
    absorb(drafter, features[0], range(20), [0, 1])
    drafter.draft([DraftBlock(int(ids[0, 20]), 20, 2, [0, 1])], choose)
    assert float((choose.logits[0][0] - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 3}])
def test_a_draft_that_computes_nan_still_proposes_tokens(serving: DraftModel, params: dict[str, Any]) -> None:
    with torch.no_grad():
        serving.norm.weight.fill_(torch.nan)
    choose = Round([RowSource(SamplingParams(**params), key=1, round=0, position=1)], torch.device("cpu"))
    drafts = Drafter(serving, make_pool(serving, 1)).draft([DraftBlock(7, 0, K, [0])], choose)
    assert ((drafts.draft_ids >= 0) & (drafts.draft_ids < 259)).all()


def test_a_shared_lm_head_is_used_as_it_is(tmp_path: Path) -> None:
    """The target's packed head serves the draft, cut to the same vocabulary."""
    target_folder = tiny_target_folder(tmp_path)
    target = load_target(target_folder)
    folder = tiny_draft_folder(tmp_path, target_folder, borrow=True)
    draft, other = load_draft(folder, target), load_draft(folder, target)
    target.prepare(max_positions=64, emit_vocab=258)
    draft.prepare(max_positions=64, emit_vocab=258, lm_head=target.lm_head)
    other.prepare(max_positions=64, emit_vocab=258)
    assert draft.lm_head is target.lm_head
    outputs = []
    for model in (draft, other):
        choose = Greedy()
        Drafter(model, make_pool(model, 1)).draft([DraftBlock(7, 0, 4, [0])], choose)
        outputs.append(torch.stack(choose.logits))
    assert outputs[0].shape == (4, 1, 258)
    assert torch.equal(*outputs)
