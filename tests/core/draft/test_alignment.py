"""With x[i] = i every index of notation.md is a value: what the engine hands to the draft, compared exactly.

Target and draft are made to count: after token i comes i + 1. The draft miscounts after some tokens, so that rounds
end at every slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark_core.checkpoint.load import load_draft, load_target
from dspark_core.draft.backbone import DraftModel
from dspark_core.draft.drafter import Choose, DraftBlock, Drafter, Drafts
from dspark_core.models.attention import FlatBatch, Segment
from dspark_core.models.decoder import TargetModel
from dspark_core.sampling import SamplingParams
from server.engine import Engine, EngineParts
from server.request import RequestParams
from tests.paged import PAGE_SIZE, make_pool
from tests.reference import NoText
from tests.tiny import tiny_draft_folder, tiny_target_folder

K, LIMIT = 5, 112
MISCOUNTED = (19, 20, 22, 25, 29, 34, 55, 57)  # after these the draft says something else


def counting_models(tmp_path: Path, head: str = "vanilla") -> tuple[TargetModel, DraftModel]:
    """Models whose logits depend on the last token alone."""
    target_folder = tiny_target_folder(tmp_path)
    weights = load_file(target_folder / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].zero_()
    embedding = weights["model.embed_tokens.weight"]
    weights["model.norm.weight"].fill_(1)
    weights["lm_head.weight"] = embedding.roll(1, 0) / embedding.norm(dim=-1).roll(1, 0).unsqueeze(-1)
    save_file(weights, target_folder / "model.safetensors")
    folder = tiny_draft_folder(
        tmp_path, target_folder, head, K, agrees=True, target_layer_ids=[-1, 1], num_hidden_layers=1
    )
    weights = load_file(folder / "model.safetensors")
    previous = weights["markov_head.markov_w1.weight"]
    previous[list(MISCOUNTED)] = previous[[100 + token for token in MISCOUNTED]].clone()
    weights["norm.weight"] *= 0.1  # the backbone's own opinion counts for nothing
    if head == "gated":
        weights["markov_head.gate_proj.weight"].zero_()
        weights["markov_head.gate_proj.bias"].fill_(20)  # open
    if head == "rnn":
        rank = previous.shape[1]
        joint = weights["markov_head.joint_proj.weight"].zero_()
        joint[2 * rank :, rank : 2 * rank] = 0.01 * torch.eye(rank)  # tanh is the identity there
        weights["markov_head.joint_proj.bias"].zero_()
        weights["markov_head.markov_w2.weight"] *= 100
    save_file(weights, folder / "model.safetensors")
    target = load_target(target_folder)
    return target, load_draft(folder, target)


class Spy:
    """Records what the serving path hands to the draft, one entry of each list a round."""

    def __init__(self, draft: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: dict[str, list[tuple[Any, ...]]] = {}
        assert draft.markov_head is not None
        assert draft.confidence_head is not None
        assert draft.runner is not None
        self.runner, self.write_context = draft.runner, draft.runner.write_context
        monkeypatch.setattr(draft, "runner", self)
        owners: list[tuple[Any, str]] = [
            (draft, "block_hidden"),
            (draft, "write_context"),
            (draft.markov_head, "embed"),
            (draft.confidence_head, "forward"),
        ]
        for owner, name in owners:
            monkeypatch.setattr(owner, name, self._recorded(name, getattr(owner, name)))

    def _recorded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.setdefault(name, []).append(arguments)
            return method(*arguments)

        return call

    def __call__(self, x: Tensor, batch: FlatBatch, *others: Any) -> Any:
        """The layers."""
        self.calls.setdefault("layers", []).append((x.clone(), batch.positions))
        return self.runner(x, batch, *others)

    def take(self) -> dict[str, list[tuple[Any, ...]]]:
        calls, self.calls = self.calls, {}
        return calls


class LastBlocks(Drafter):
    """Keeps the blocks it was asked for, and what it drafted."""

    blocks: Sequence[DraftBlock] = ()
    drafts: Drafts

    def draft(self, blocks: Sequence[DraftBlock], choose: Choose) -> Drafts:
        self.blocks = [replace(block, pages=list(block.pages)) for block in blocks]  # tables change after the round
        self.drafts = super().draft(blocks, choose)
        return self.drafts


@pytest.fixture(params=["vanilla", "gated", "rnn"])
def parts(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Engine, LastBlocks, DraftModel]:
    target, draft = counting_models(tmp_path, request.param)
    target.prepare(max_positions=LIMIT)
    draft.prepare(max_positions=LIMIT)
    num_pages = 2 * LIMIT // PAGE_SIZE
    drafter = LastBlocks(draft, make_pool(draft, num_pages))
    engine = Engine(
        EngineParts(
            target=target,
            pool=make_pool(target, num_pages),
            drafter=drafter,
            tokenizer=cast(Any, NoText()),
            eos_token_ids=frozenset(),
            vocab_size=259,
            max_model_len=LIMIT,
            max_num_batched_tokens=40,  # the longer prompt takes two chunks
            prefix_cache=False,  # both texts are the same
        )
    )
    return engine, drafter, draft


def test_serving_hands_the_heads_what_notation_says(
    parts: tuple[Engine, LastBlocks, DraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case A9."""
    engine, drafter, draft = parts
    spy = Spy(draft, monkeypatch)
    greedy = RequestParams(SamplingParams(temperature=0.0), max_tokens=45)
    requests = [engine.make_request(list(range(size)), greedy) for size in (14, 51)]
    for request in requests:
        engine.add(request)
    written: dict[int, set[int]] = {}  # first page of a request: positions whose context was written
    rounds = 0
    while engine.has_work:
        drafter.blocks = ()
        engine.step()
        calls = spy.take()
        if drafter.blocks:
            check_block(drafter, draft, calls)
            for block in drafter.blocks:
                assert written[block.pages[0]] == set(range(block.position)), "context is every token before the anchor"
            rounds += 1
        for features, positions, slots, _ in calls.get("write_context", []):
            note_context(engine, features, positions, slots, written)
    assert rounds > 10
    for request in requests:
        assert request.tokens == list(range(len(request.tokens))), "the target counts"
        assert len(request.tokens) == len(request.prompt_ids) + 45


def check_block(drafter: LastBlocks, draft: DraftModel, calls: dict[str, list[tuple[Any, ...]]]) -> None:
    """One round: anchors x[p], masks, positions p + s, previous tokens, and how far each row sees."""
    blocks, drafted = drafter.blocks, drafter.drafts.draft_ids
    slots = drafted.shape[1]
    ((batch, _),) = calls["block_hidden"]
    ids, positions, places, segments = batch.token_ids, batch.positions, batch.slots, batch.segments
    start = 0
    for row, block in enumerate(blocks):
        p, rows = block.position, slice(start, start + block.num_slots)
        span = list(range(p, p + block.num_slots))
        assert block.anchor_id == p, "the anchor is the last committed token, at its own position"
        assert ids[rows].tolist() == [p] + [258] * (block.num_slots - 1)
        assert positions[rows].tolist() == span
        assert places[rows].tolist() == [block.pages[q // PAGE_SIZE] * PAGE_SIZE + q % PAGE_SIZE for q in span]
        # Keys 0 .. p - 1 are context, p .. p + K - 1 the own block, seen from each of its rows.
        assert segments[row] == Segment(start, block.num_slots, span[-1], segments[row].pages, causal=False)
        start = rows.stop
    ((inputs, angles),) = calls["layers"]
    assert torch.equal(inputs, draft.embed_tokens(ids))
    assert torch.equal(angles, positions), "rotary positions are p + s"
    anchors = torch.tensor([block.position for block in blocks]).unsqueeze(-1)
    previous = torch.cat((anchors, drafted[:, :-1]), -1)
    if "embed" in calls:  # a vanilla head embeds in a kernel: below is what came of it
        embedded_ids = torch.stack([call[0] for call in calls["embed"]], 1)
        assert torch.equal(embedded_ids, previous), "slot s sees what was drafted at s - 1"
    right = (drafted[:, :-1] == anchors + torch.arange(1, slots)).cumprod(-1).bool()
    counted = anchors + torch.arange(slots)
    assert torch.equal(previous[:, 1:][right], counted[:, 1:][right]), "which is x[p + s] while the draft is right"
    ((hidden, embedded),) = calls["forward"]
    assert hidden.shape[:2] == (len(blocks), slots)
    assert draft.markov_head is not None
    assert torch.equal(embedded, draft.markov_head.markov_w1.weight[previous])


def note_context(
    engine: Engine, features: Tensor, positions: Tensor, slots: Tensor, written: dict[int, set[int]]
) -> None:
    """Features of position i are the target's outputs at token i, and go to position i of the request's pages."""
    embedding = engine.target.embed_tokens.weight
    assert torch.equal(features[:, : embedding.shape[1]], embedding[positions]), "tap -1 at position i is token i's"
    owners = {
        page * PAGE_SIZE + offset: (request.table.pages[0], number * PAGE_SIZE + offset)
        for request in engine.scheduler.running
        for number, page in enumerate(request.table.pages)
        for offset in range(PAGE_SIZE)
    }
    for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
        if slot not in owners:
            continue  # its request ended with this step
        first, expected = owners[slot]
        assert position == expected
        written.setdefault(first, set()).add(position)


def test_rounds_end_at_every_slot(parts: tuple[Engine, LastBlocks, DraftModel]) -> None:
    """The test above covers rejections only if they happen: case Q3, each by its own count."""
    engine, drafter, _ = parts
    request = engine.make_request(list(range(14)), RequestParams(SamplingParams(temperature=0.0), max_tokens=60))
    engine.add(request)
    accepted: set[int] = set()
    while engine.has_work:
        before = len(request.tokens)
        drafter.blocks = ()
        engine.step()
        if drafter.blocks:
            accepted.add(len(request.tokens) - before - 1)
    assert accepted == set(range(K + 1))
