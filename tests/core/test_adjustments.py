"""Biases, bans and grammars row by row of a block, beside penalties, and without a trace in anybody else's scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark_core.adjustments import NEVER, Adjustments, RowSource
from dspark_core.errors import RequestError
from dspark_core.sampler import Round
from dspark_core.sampling import SamplingParams
from tests.core.slow import CPU, slow_penalties
from tests.core.test_grammar import EOS, V, encode, start

PLAIN = RowSource(SamplingParams(), 0, 0, 0)
BLOCK = [5, 9, 5]
LOGITS = torch.randn(4, V, generator=torch.Generator().manual_seed(0)) * 3


def source(sampling: dict[str, Any] | None = None, **fields: Any) -> RowSource:
    return replace(PLAIN, params=SamplingParams(**(sampling or {})), **fields)


def adjusted(own: RowSource, block: list[int] = BLOCK) -> torch.Tensor:
    """All rows at once, having checked that they equal the rows one by one."""
    ids, whole, single = torch.tensor(block), LOGITS.clone(), LOGITS.clone()
    Adjustments(own, CPU).apply_(whole, ids)
    one_by_one = Adjustments(own, CPU)
    for row in range(len(LOGITS)):
        one_by_one.apply_(single[row : row + 1], ids[:row], first=row)
    assert torch.equal(single, whole)
    return whole


def test_a_bias_is_added_to_every_row() -> None:
    found = adjusted(source({"logit_bias": ((7, -100.0), (3, 2.5))}))
    difference = found - LOGITS
    assert torch.allclose(difference[:, [7, 3]], torch.tensor([-100.0, 2.5]).expand(4, -1), atol=1e-4)
    difference[:, [7, 3]] = 0
    assert not difference.any()


def test_a_bias_comes_on_top_of_penalties() -> None:
    sampling = {"presence_penalty": 1.0, "repetition_penalty": 1.5, "logit_bias": ((5, 10.0),)}
    found = adjusted(source(sampling, prompt_ids=[2], output_ids=[9]))
    for row in range(4):
        seen = [9, *BLOCK[:row]]
        expected = slow_penalties(LOGITS[row].tolist(), SamplingParams(**sampling), [2], seen)  # type: ignore[arg-type]
        expected[5] += 10
        assert found[row].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("slots", [-3, 0, 1, 3, 4, 9])
def test_bans_hold_for_the_first_slots_alone(slots: int) -> None:
    found = adjusted(source(banned_ids=[1, 7], banned_slots=slots))
    assert (found[:, [1, 7]] == NEVER).all(-1).tolist() == [row < slots for row in range(4)]
    assert (found == NEVER).sum() == 2 * min(max(slots, 0), 4)
    assert not source(banned_ids=[1, 7], banned_slots=0).adjusted


def test_bans_leave_something_to_choose() -> None:
    assert torch.equal(adjusted(source(banned_ids=range(V), banned_slots=2)), LOGITS)
    assert (adjusted(source(banned_ids=range(1, V + 9), banned_slots=9)) == NEVER).sum() == 4 * (V - 1)


def test_a_grammar_masks_each_row_by_the_tokens_before_it() -> None:
    block = encode("yex")
    found = adjusted(source(constraint=start("choice", ["yes", "no", "y"])), block)
    kept = [[tuple(encode("n")), tuple(encode("y"))], [tuple(encode("e"))], [tuple(encode("s"))]]
    for row, texts in enumerate(kept[:1]):
        assert sorted((found[row] != NEVER).nonzero().flatten().tolist()) == sorted(t[0] for t in texts)
    assert sorted((found[1] != NEVER).nonzero().flatten().tolist()) == sorted([*encode("e"), *EOS])
    assert (found[2] != NEVER).nonzero().flatten().tolist() == encode("s")
    assert torch.equal(found[3], LOGITS[3]), "behind a token that must be rejected nothing is asked"
    left = found != NEVER
    assert torch.equal(found[left], LOGITS[left])


def test_a_ban_gives_way_where_a_grammar_has_no_other_way() -> None:
    own = source(constraint=start("choice", ["ye", "y"]), banned_ids=EOS, banned_slots=9)
    found = adjusted(own, encode("yee"))
    assert (found[1] != NEVER).nonzero().flatten().tolist() == encode("e"), "the text may end here, but need not"
    assert (found[2] != NEVER).nonzero().flatten().tolist() == sorted(EOS), "here it must"


def test_neighbours_are_untouched() -> None:
    greedy = SamplingParams(temperature=0)
    sources = [
        replace(PLAIN, params=greedy),
        replace(PLAIN, params=greedy, constraint=start("choice", ["yes"])),
        replace(PLAIN, params=replace(greedy, logit_bias=((8, 100.0),))),
        replace(PLAIN, params=greedy, banned_ids=[4], banned_slots=1),
    ]
    logits = torch.zeros(4, V)
    logits[:, 4] = 1
    none = torch.empty(4, 0, dtype=torch.int64)
    this, before = Round(sources, CPU), logits.clone()
    assert this(0, logits, none).tolist() == [4, *encode("y"), 8, 0]
    assert torch.equal(logits, before)
    ids = torch.tensor([[4], encode("y"), [8], [0]])
    verified = this.verify(logits.repeat_interleave(2, 0), ids, [1, 1, 1, 1])
    assert verified.num_accepted.tolist() == [1, 1, 1, 1]
    assert verified.next_ids.tolist() == [4, *encode("e"), 8, 4]


@pytest.mark.parametrize("bias", [100.5, -101.0, float("nan"), float("inf")])
def test_a_bias_out_of_range_is_refused(bias: float) -> None:
    with pytest.raises(RequestError, match="logit_bias") as caught:
        SamplingParams(logit_bias=((1, bias),))
    assert caught.value.field == "logit_bias"
