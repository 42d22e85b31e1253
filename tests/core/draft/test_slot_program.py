"""A block's slots in one call of kernels are what they are one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_core.adjustments import RowSource
from dspark_core.checkpoint.load import load_draft, load_target
from dspark_core.draft.backbone import DraftModel
from dspark_core.draft.drafter import DraftBlock, Drafter, Drafts
from dspark_core.draft.slot_program import SlotProgram
from dspark_core.logit_rows import SlotChoice
from dspark_core.models.linear import can_pack
from dspark_core.sampler import Round
from dspark_core.sampling import SamplingParams
from tests.core.draft.test_drafter import K, absorb
from tests.core.kernels.local import local_kernel
from tests.paged import make_pool
from tests.tiny import tiny_draft_folder, tiny_target_folder

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="no CPU kernels here")

RULES: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}] * 3,
    "ratio": [{"temperature": 1.0}] * 3,
    "ratio, temperatures": [{"temperature": t} for t in (0.3, 1.0, 2.0)],
    "coupled": [{"temperature": 1.0, "seed": n} for n in range(3)],
    "coupled, temperatures": [{"temperature": t, "seed": 5} for t in (0.3, 1.0, 2.0)],
}


@pytest.fixture
def model(tmp_path: Path) -> DraftModel:
    return model_of(tmp_path, K)


def model_of(tmp_path: Path, draft_len: int) -> DraftModel:
    target_folder = tiny_target_folder(tmp_path)
    draft = load_draft(tiny_draft_folder(tmp_path, target_folder, "vanilla", draft_len), load_target(target_folder))
    with torch.no_grad():  # so that the token before a slot decides what it says
        draft.markov_head.markov_w1.weight.mul_(30)
    draft.prepare(max_positions=64)
    return draft


def rounds_of(rule: list[dict[str, Any]]) -> Round:
    sources = [RowSource(SamplingParams(**params), 9 + n, 4, 20 + n) for n, params in enumerate(rule)]
    return Round(sources, CPU)


def drafted(model: DraftModel, choose: Round, lens: tuple[int, ...] = (K, 2, 4), *, by_slot: bool) -> Drafts:
    """Blocks after contexts of different lengths."""
    drafter = Drafter(model, make_pool(model, 9))
    assert drafter.slot_program is not None
    blocks = []
    for row, size in enumerate(lens):
        pages, position = [row, 3 + row, 6 + row], 3 + 5 * row
        features = torch.randn(position, 64, generator=torch.Generator().manual_seed(row))
        absorb(drafter, features, range(position), pages)
        blocks.append(DraftBlock(7 + row, position, size, pages))
    if by_slot:
        drafter.slot_program = None
    return drafter.draft(blocks, choose)


@pytest.mark.parametrize("rule", RULES)
def test_the_same_bits(model: DraftModel, rule: str) -> None:
    """And the same distributions, as far as verification looks at them."""
    rounds = [rounds_of(RULES[rule]) for _ in range(2)]
    assert rounds[1].in_kernels(K) is not None
    one_by_one, at_once = (drafted(model, rounds[n], by_slot=n == 0) for n in range(2))
    assert torch.equal(one_by_one.draft_ids, at_once.draft_ids)
    assert len(set(at_once.draft_ids[0].tolist())) > 1
    assert one_by_one.confidence_logits is not None
    assert at_once.confidence_logits is not None
    assert torch.equal(one_by_one.confidence_logits, at_once.confidence_logits)
    lens = [K, 2, 3]
    logits = torch.randn(sum(lens) + 3, 259, generator=torch.Generator().manual_seed(1))
    stood = [this.verify(logits, at_once.draft_ids, lens) for this in rounds]
    assert torch.equal(stood[0].num_accepted, stood[1].num_accepted)
    assert torch.equal(stood[0].next_ids, stood[1].next_ids)


@pytest.mark.parametrize("rule", ["greedy", "ratio", "coupled"])
def test_many_slots_of_one_request(tmp_path: Path, rule: str) -> None:
    """More than a round makes its numbers for at once, when it goes slot by slot."""
    model, (first, *_) = model_of(tmp_path, 20), RULES[rule]
    one_by_one, at_once = (drafted(model, rounds_of([first]), (20,), by_slot=by_slot) for by_slot in (True, False))
    assert torch.equal(one_by_one.draft_ids, at_once.draft_ids)
    assert len(set(at_once.draft_ids[0].tolist())) > 10


def _leave_all(a):  # type: ignore[no-untyped-def]
    """As a kernel that gets no memory: none of its tasks is taken."""


def test_a_choice_that_gave_up_is_an_error_and_nothing_is_read_by_it(model: DraftModel) -> None:
    program = SlotProgram.of(model.markov_head)
    assert program is not None
    logits, anchors = torch.zeros(K, 3, program.projection.out_features), torch.tensor([1, 2, 3])
    with pytest.raises(MemoryError):
        program.run(logits, anchors, SlotChoice(local_kernel(_leave_all), ("x", "ids"), {}))


@pytest.mark.parametrize("shape", [(K, 2), (K - 1, 3), (1, 3)], ids=str)
def test_numbers_for_other_slots_or_requests_are_refused(model: DraftModel, shape: tuple[int, int]) -> None:
    program = SlotProgram.of(model.markov_head)
    assert program is not None
    logits, anchors = torch.zeros(K, 3, program.projection.out_features), torch.tensor([1, 2, 3])
    with pytest.raises(AssertionError):
        program.run(logits, anchors, SlotChoice.drawn(None, torch.zeros(shape, dtype=torch.float64)))
    with pytest.raises(AssertionError):
        SlotChoice.drawn(torch.ones(2), torch.zeros(K, 3, dtype=torch.float64))


@pytest.mark.parametrize("rule", ["greedy", "ratio", "coupled"])
def test_a_draft_that_computes_nan_still_proposes_tokens(model: DraftModel, rule: str) -> None:
    """Case S3."""
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    for by_slot in (True, False):
        drafts = drafted(model, rounds_of(RULES[rule]), (K, K, K), by_slot=by_slot)
        assert drafts.draft_ids.tolist() == [[0] * K] * 3


@pytest.mark.parametrize(
    "rule",
    [
        [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0}],
        [{"temperature": 1.0, "top_k": 2}, {"temperature": 1.0}, {"temperature": 1.0}],
        [{"temperature": 1.0, "seed": 1}, {"temperature": 1.0}, {"temperature": 1.0}],
        [{"temperature": 0.0, "logit_bias": ((5, 9.0),)}] * 3,
    ],
    ids=["greedy and sampled", "filters", "two rules", "adjustments"],
)
def test_what_kernels_cannot_do_goes_slot_by_slot(model: DraftModel, rule: list[dict[str, Any]]) -> None:
    assert rounds_of(rule).in_kernels(K) is None
    one_by_one, other = (drafted(model, rounds_of(rule), by_slot=by_slot) for by_slot in (True, False))
    assert torch.equal(one_by_one.draft_ids, other.draft_ids)
