"""Statistics tell what really happened, and the draft sees the same context as if it had been computed afresh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark_core.draft.backbone import DraftModel
from dspark_core.draft.drafter import Choose, DraftBlock, Drafter, Drafts
from dspark_core.sampling import SamplingParams
from server.request import Request, RequestParams, Speculation
from server.watch import Watch
from tests.server.drafts import FakeDrafter, ScriptedDrafter
from tests.server.engines import (
    GREEDY,
    make_engine,
    make_pool,
    make_prompt,
    reference_greedy,
    run,
    run_one,
    tiny_draft,
)
from tests.server.policies import Lengths

COUNT = 24
PROMPT = make_prompt(18)


def continuation(request: Request) -> list[int]:
    return reference_greedy(tuple(request.prompt_ids), COUNT)


def greedy(max_tokens: int = COUNT, **fields: Any) -> RequestParams:
    return RequestParams(GREEDY, max_tokens=max_tokens, **fields)


@pytest.mark.parametrize(
    ("draft_len", "pattern", "max_tokens", "expected"),
    [
        # One token comes with the prompt; a round of k accepted drafts brings k + 1.
        (7, [-1], 17, Speculation(rounds=2, drafted=14, verified=14, accepted=14)),
        (7, [-1], 22, Speculation(rounds=3, drafted=18, verified=18, accepted=18)),  # the last block has 4
        (7, [-1], 18, Speculation(rounds=2, drafted=14, verified=14, accepted=14)),  # the last token needs none
        (7, [3], 17, Speculation(rounds=4, drafted=24, verified=24, accepted=12)),  # slots 7, 7, 7 and 3
        (3, [0], 5, Speculation(rounds=3, drafted=6, verified=6, accepted=0)),  # slots 3, 2, 1, then a lone token
        (1, [-1, 0], 7, Speculation(rounds=3, drafted=3, verified=3, accepted=2)),
        (5, [-1], 2, Speculation()),
        (5, [-1], 1, Speculation()),
    ],
)
def test_counts_of_scripted_acceptance(
    draft_len: int, pattern: list[int], max_tokens: int, expected: Speculation
) -> None:
    """Case T4."""
    engine = make_engine(ScriptedDrafter(draft_len, continuation, pattern))
    result = run_one(engine, PROMPT, greedy(max_tokens))
    assert result.last.speculation == expected
    assert result.last.speculation.acceptance_length == 1 + expected.accepted / max(expected.rounds, 1)


def test_blocks_that_are_cut_short_are_counted_as_they_were() -> None:
    """Cases T4 and T5: of 7 drafts 2 are verified; blocks near the end have fewer."""
    engine = make_engine(ScriptedDrafter(7, continuation, [-1]))
    engine.policy = Lengths(admit=lambda slots, _: [min(2, size) for size in slots])
    watch = Watch(engine)
    result = run_one(engine, PROMPT, greedy(13))
    assert result.last.speculation == Speculation(rounds=4, drafted=7 + 7 + 5 + 2, verified=8, accepted=8)
    counts = watch.counts
    assert (counts.rounds, counts.drafted, counts.verified, counts.accepted) == (4, 21, 8, 8)
    assert counts.accepted_at == [4, 4, 0, 0, 0, 0, 0]


def test_totals_in_deltas_only_grow() -> None:
    result = run_one(make_engine(ScriptedDrafter(4, continuation, [2, 0, 4])), PROMPT, greedy())
    for before, after in zip(result.deltas, result.deltas[1:], strict=False):
        assert after.completion_tokens >= before.completion_tokens
        assert after.speculation.rounds >= before.speculation.rounds
        assert after.speculation.accepted >= before.speculation.accepted


def test_plain_requests_are_never_drafted_for() -> None:
    drafter = ScriptedDrafter(4, continuation, [-1])
    plain, drafted = run(make_engine(drafter), [(PROMPT, greedy(speculative=False)), (PROMPT, greedy())])
    assert plain.last.speculation == Speculation()
    assert set(drafter.batch_sizes) == {1}
    assert len(drafter.batch_sizes) == drafted.last.speculation.rounds
    assert plain.ids == drafted.ids


def test_without_anybody_who_drafts_the_draft_does_nothing() -> None:
    class Absent(FakeDrafter):
        def absorb(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
            raise AssertionError("context was written for a request that does not draft")

    engine = make_engine(Absent(4))
    assert run_one(engine, PROMPT, greedy(speculative=False)).ids == reference_greedy(tuple(PROMPT), COUNT)


def test_acceptance_recovers_after_a_rejection() -> None:
    """Case A6."""
    drafter = ScriptedDrafter(5, continuation, [-1, 0, -1, -1])
    result = run_one(make_engine(drafter), PROMPT, greedy(20))
    # 1 + (5 + 1) + (0 + 1) + (5 + 1) + (5 + 1) = 20
    assert result.last.speculation == Speculation(rounds=4, drafted=20, verified=20, accepted=15)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.6, seed=1)], ids=["greedy", "coupled"])
def test_acceptance_does_not_wear_out(sampling: SamplingParams) -> None:
    """Case P7."""
    engine = make_engine(tiny_draft("vanilla", 3, agrees=True), num_tokens=256)
    prompt = make_prompt(180, seed=2)
    results = [run_one(engine, prompt, RequestParams(sampling, max_tokens=40)) for _ in range(5)]
    assert results[0].last.speculation.accepted > 0
    assert len({result.last.speculation for result in results}) == 1
    assert len({tuple(result.ids) for result in results}) == 1


class Recorder(Drafter):
    """A real drafter that keeps the logits of every block by the position of its anchor (one request at a time)."""

    def __init__(self, model: DraftModel) -> None:
        super().__init__(model, make_pool(model.config.decoder, 1, 16))
        self.blocks: dict[int, Tensor] = {}

    def draft(self, blocks: Sequence[DraftBlock], choose: Choose) -> Drafts:
        rows: list[Tensor] = []

        def record(slot: int, logits: Tensor, draft_ids: Tensor) -> Tensor:
            rows.append(logits[0])
            return choose(slot, logits, draft_ids)

        drafts = super().draft(blocks, record)
        rows.append(drafts.draft_ids[0].float())
        if drafts.confidence_logits is not None:
            rows.append(drafts.confidence_logits[0])
        self.blocks[blocks[0].position] = torch.cat([row.flatten() for row in rows])
        return drafts


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
@pytest.mark.parametrize("length", [1, 8, 61, 200])
def test_every_block_equals_one_drafted_after_a_fresh_prefill(head: str, length: int) -> None:
    """Cases A6, A9 and A10: only context of committed tokens outlives a round, at its true positions."""
    prompt, model = make_prompt(length), tiny_draft(head, 4, agrees=head == "vanilla")
    recorder = Recorder(model)
    text = run_one(make_engine(recorder), prompt, greedy()).ids
    assert len(recorder.blocks) > 4
    for position, block in recorder.blocks.items():
        if position + model.config.draft_len < length + COUNT - 1:
            fresh = Recorder(model)
            tokens = [*prompt, *text][:position]
            run_one(make_engine(fresh), tokens, greedy(model.config.draft_len + 2))
            assert torch.allclose(fresh.blocks[position], block, atol=1e-4), position
