"""Drafters that stand behind the seam of `dspark_core.draft.drafter.Drafter` and propose what a test wants.

Each checks on the way that the engine keeps the seam's promises: the block starts at the request's true anchor, pages
cover it, and the context of exactly the tokens before it was given. The context is recognisable because these drafts
tap the target's embedding output: the features of a token are its own embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from dspark_core.draft.drafter import Choose, DraftBlock, Drafts
from dspark_core.models.kv_cache import KVPool
from server.engine import Engine
from server.request import Request
from tests.server.engines import TinyTarget, tiny_target

# So far above the others that no Gumbel noise (at most 37 in 53 bits) chooses another token.
CERTAIN = 1000.0
Continuation = Callable[[Request], Sequence[int]]


class FakeDrafter:
    """Base: `logits` says what the draft's distribution is, `choose` draws from it as for a real draft."""

    pool: KVPool

    def __init__(self, draft_len: int, target: TinyTarget | None = None) -> None:
        self.target = target or tiny_target()
        hidden_size = self.target.model.config.hidden_size
        # One layer, one head as wide as the features: the pool's keys are the features themselves.
        decoder = SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=hidden_size)
        config = SimpleNamespace(draft_len=draft_len, target_layer_ids=(-1,), decoder=decoder)
        self.model = SimpleNamespace(config=config)
        self.batch_sizes: list[int] = []

    def attach(self, engine: Engine) -> None:
        self.engine = engine

    def draft(self, blocks: Sequence[DraftBlock], choose: Choose) -> Drafts:
        requests = [self._check(block) for block in blocks]
        self.batch_sizes.append(len(blocks))
        draft_ids = torch.empty(len(blocks), 0, dtype=torch.int64)
        for slot in range(max(block.num_slots for block in blocks)):
            chosen = choose(slot, self.logits(requests, slot, draft_ids), draft_ids)
            draft_ids = torch.cat((draft_ids, self.proposed(requests, slot, chosen).unsqueeze(-1)), -1)
        return Drafts(draft_ids, None)

    def logits(self, requests: Sequence[Request], slot: int, draft_ids: Tensor) -> Tensor:
        """[R, V]: the draft's scores of one slot."""
        raise NotImplementedError

    def proposed(self, requests: Sequence[Request], slot: int, chosen: Tensor) -> Tensor:
        """[R]: what is proposed; anything but `chosen` is a draft that lies about its distribution."""
        return chosen

    def absorb(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        assert len(set(slots.tolist())) == len(slots), "two rows go to one slot"
        assert torch.equal(slots % self.pool.page_size, positions % self.pool.page_size)
        self.pool.write(0, slots, features.unsqueeze(1), features.unsqueeze(1))

    def _check(self, block: DraftBlock) -> Request:
        """The request that a block belongs to."""
        (request,) = (r for r in self.engine.scheduler.running if r.table.pages is block.pages)
        assert block.position == len(request.tokens) - 1
        assert block.anchor_id == request.tokens[-1]
        assert 1 <= block.num_slots <= self.model.config.draft_len
        assert block.position + block.num_slots <= len(block.pages) * self.pool.page_size
        context = self.pool.read(0, torch.tensor(list(block.pages)))[0][0, : block.position]
        expected = self.target.model.embed_tokens(torch.tensor(request.tokens[: block.position]))
        assert torch.equal(context, expected), "the draft's context is not that of the committed tokens"
        return request


class ScriptedDrafter(FakeDrafter):
    """Proposes the true continuation, wrong from a chosen slot on.

    Args:
        continuation: the tokens that the engine will emit for a request.
        pattern: right slots of a request's first, second, ... drafted round, repeated; -1 stands for all.
    """

    def __init__(
        self, draft_len: int, continuation: Continuation, pattern: Sequence[int], target: TinyTarget | None = None
    ) -> None:
        super().__init__(draft_len, target)
        self.continuation, self.pattern = continuation, pattern

    def logits(self, requests: Sequence[Request], slot: int, draft_ids: Tensor) -> Tensor:
        scores = torch.zeros(len(requests), self.target.vocab_size)
        for row, request in zip(scores, requests, strict=True):
            right = self.pattern[request.speculation.rounds % len(self.pattern)]
            text, place = self.continuation(request), request.num_generated + slot
            token = text[place] if place < len(text) else 0
            row[token if right < 0 or slot < right else (token + 1) % len(row)] = CERTAIN
        return scores


def oracle(draft_len: int, continuation: Continuation) -> ScriptedDrafter:
    """Always right."""
    return ScriptedDrafter(draft_len, continuation, [-1])


def adversary(draft_len: int, continuation: Continuation) -> ScriptedDrafter:
    """Never right."""
    return ScriptedDrafter(draft_len, continuation, [0])


class TableDrafter(FakeDrafter):
    """Draws from a fixed random distribution per slot, which has nothing to do with the target."""

    def __init__(self, draft_len: int, target: TinyTarget, seed: int = 0) -> None:
        super().__init__(draft_len, target)
        generator = torch.Generator().manual_seed(seed)
        self.table = 1.5 * torch.randn(draft_len, target.vocab_size, generator=generator)

    def logits(self, requests: Sequence[Request], slot: int, draft_ids: Tensor) -> Tensor:
        return self.table[slot].expand(len(requests), -1)


class LyingDrafter(TableDrafter):
    """Proposes its most likely token, yet reports the distribution as if it had drawn from it."""

    def proposed(self, requests: Sequence[Request], slot: int, chosen: Tensor) -> Tensor:
        return self.table[slot].argmax().expand(len(chosen))


class ConfidentDrafter(TableDrafter):
    """Says how sure it is of each slot, by the token before it as a confidence head does.

    Args:
        leaks: whether it looks at the slot's own token instead, which no head may.
        logit: confidence logit of a slot from the token that it looks at.
    """

    def __init__(
        self, draft_len: int, target: TinyTarget, logit: Callable[[int], float], seed: int = 0, *, leaks: bool = False
    ) -> None:
        super().__init__(draft_len, target, seed)
        self.logit, self.leaks = logit, leaks

    def draft(self, blocks: Sequence[DraftBlock], choose: Choose) -> Drafts:
        ids = super().draft(blocks, choose).draft_ids
        anchors = torch.tensor([[block.anchor_id] for block in blocks])
        shown = ids if self.leaks else torch.cat((anchors, ids[:, :-1]), -1)
        return Drafts(ids, torch.tensor([[self.logit(token) for token in row] for row in shown.tolist()]))
