"""One round of sampling for a batch: chooses draft tokens slot by slot, then verifies them.

Requests of three kinds share a batch: greedy, ratio (temperature, no seed) and coupled (temperature and seed). A
round is made fresh in every step from what the host knows; it holds no state beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark_core.adjustments import Adjustments, RowSource
from dspark_core.devices import tensor_on
from dspark_core.distributions import Distributions, distributions
from dspark_core.randomness import Purpose, round_uniform
from dspark_core.sampling import Filters, SamplingParams
from dspark_core.verify import Verified, greedy_choices, verify_choices

if TYPE_CHECKING:
    from dspark_core.logit_rows import SlotChoice


class Round:
    """Draft choices and verification of R requests. It is called for the choices of a slot (see `Drafter.draft`).

    Args:
        sources: one per request, in batch order.
        device: of the logits.
    """

    def __init__(self, sources: Sequence[RowSource], device: torch.device) -> None:
        self.sources, self.device = sources, device
        # Places of each kind of request.
        self.greedy = [i for i, s in enumerate(sources) if s.params.greedy]
        self.ratio = [i for i, s in enumerate(sources) if not s.params.greedy and s.params.seed is None]
        self.coupled = [i for i, s in enumerate(sources) if not s.params.greedy and s.params.seed is not None]
        # [len(ratio)] each, and [len(coupled)].
        self.ratio_keys, self.ratio_rounds = self._columns(self.ratio, "key", "round")
        self.coupled_keys, self.coupled_positions = self._columns(self.coupled, "key", "position")
        self.ratio_filters = self._filters(self.ratio)
        self.coupled_filters = self._filters(self.coupled)
        self.adjustments = {i: Adjustments(s, device) for i, s in enumerate(sources) if s.adjusted}
        self._draft_numbers = torch.empty(0, 0)  # per slot [len(ratio)]
        self.drafts: list[Distributions] = []  # per slot, of the ratio rule

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return tensor_on(self.device, values)

    def _columns(self, places: list[int], *names: str) -> tuple[Tensor, ...]:
        if not places:
            return (torch.empty(0),) * len(names)
        return self._tensor([[getattr(self.sources[i], name) for i in places] for name in names]).unbind()

    def _filters(self, places: list[int]) -> Filters | None:
        return Filters.of([self.sources[i].params for i in places], self.device) if places else None

    def __call__(self, slot: int, logits: Tensor, draft_ids: Tensor) -> Tensor:
        """Draft tokens [R] of one slot from the draft's logits [R, V].

        Args:
            draft_ids: [R, slot] chosen before, which adjustments look at.
        """
        ids = self._choose(slot, self._adjust_draft(logits, draft_ids), self._draft_u, self.drafts)
        # Where there is no choice, since the draft computed NaN or adjustments left nothing, any token will do: under
        # the ratio rule it never stands, and what follows it is drawn from the target alone.
        return ids.clamp_min_(0)

    def in_kernels(self, slots: int) -> SlotChoice | None:
        """The same choices in so many slots as a kernel, if all requests are alike and nothing else is to be done to
        their logits. What it chose from must then be told to `drew_from`.
        """
        kinds = [kind for kind in (self.greedy, self.ratio, self.coupled) if kind]
        filters = self.ratio_filters or self.coupled_filters
        if self.adjustments or len(kinds) > 1 or (filters and filters.drops_tokens):
            return None
        from dspark_core.logit_rows import SlotChoice  # needs llvmlite

        if self.greedy or not filters:
            return SlotChoice.most_likely()
        if self.ratio:
            self._draft_u(slots - 1)
            return SlotChoice.drawn(filters.temperature, self._draft_numbers[:slots])
        positions = self.coupled_positions + torch.arange(slots).unsqueeze(-1)
        return SlotChoice.coupled(filters.temperature, self.coupled_keys, positions)

    def drew_from(self, logits: Tensor) -> None:
        """Remember what a kernel chose drafts from: logits [K, R, V]."""
        if self.ratio_filters:
            self.drafts = [distributions(rows, self.ratio_filters) for rows in logits]

    def next_ids(self, logits: Tensor) -> Tensor:
        """The tokens [R] of requests without drafts, from the target's logits [R, V]."""
        if self.adjustments:
            nothing = torch.empty(len(logits), 0, dtype=torch.int64, device=self.device)
            logits = self._adjust_target(logits, nothing, [0] * len(logits))
        return self._choose(0, logits, lambda _: self._uniform(Purpose.RESIDUAL, 1)[:, 0], [])

    def _choose(
        self, slot: int, logits: Tensor, ratio_u: Callable[[int], Tensor], drawn_from: list[Distributions]
    ) -> Tensor:
        """One token of each row: the most likely one, one drawn by `ratio_u` of the slot, or the coupled choice."""

        def drawn(rows: Tensor) -> Tensor:
            assert self.ratio_filters is not None
            drawn_from.append(distributions(rows, self.ratio_filters))
            return drawn_from[-1].draw(ratio_u(slot))

        def coupled(rows: Tensor) -> Tensor:
            assert self.coupled_filters is not None
            return distributions(rows, self.coupled_filters).couple(self.coupled_keys, self.coupled_positions + slot)

        kinds = (self.greedy, greedy_choices), (self.ratio, drawn), (self.coupled, coupled)
        for places, choice in kinds:
            if len(places) == len(self.sources):  # all alike: no copy of their rows
                return choice(logits)
        ids = torch.empty(len(self.sources), dtype=torch.int64, device=self.device)
        for places, choice in kinds:
            if places:
                index = self._tensor(places)
                ids[index] = choice(logits[index])
        return ids

    def verify(self, logits: Tensor, draft_ids: Tensor, verify_lens: Sequence[int]) -> Verified:
        """What stands of each block, by each request's own rule. All requests drafted.

        Args:
            logits: [sum(l + 1), V] target scores of the rows of all requests, in batch order.
            draft_ids: [R, K].
            verify_lens: [R] admitted draft tokens.
        """
        logits = self._adjust_target(logits, draft_ids, verify_lens)
        kinds = [
            (places, rule)
            for places, rule in ((self.greedy, self._greedy), (self.ratio, self._ratio), (self.coupled, self._coupled))
            if places
        ]
        if len(kinds) == 1:  # all alike: no copy of their rows
            return kinds[0][1](logits, draft_ids, Rows(verify_lens, self.device))
        accepted, following = (torch.empty(len(verify_lens), dtype=torch.int64, device=self.device) for _ in range(2))
        first_row = [0, *accumulate(length + 1 for length in verify_lens)]
        for places, rule in kinds:
            rows = self._tensor([row for i in places for row in range(first_row[i], first_row[i + 1])])
            index, own = self._tensor(places), Rows([verify_lens[i] for i in places], self.device)
            accepted[index], following[index] = rule(logits[rows], draft_ids[index], own)
        return Verified(accepted, following)

    def _greedy(self, logits: Tensor, draft_ids: Tensor, rows: Rows) -> Verified:
        return verify_choices(greedy_choices(logits), draft_ids, rows.start, rows.lens)

    def _ratio(self, logits: Tensor, draft_ids: Tensor, rows: Rows) -> Verified:
        filters = self.ratio_filters
        assert filters is not None
        return distributions(logits, filters.rows(rows.owner) if filters.in_use else filters).verify(
            draft_ids,
            self.drafts,
            rows.start,
            rows.lens,
            accept_u=self._uniform(Purpose.ACCEPT, draft_ids.shape[1]),
            residual_u=self._uniform(Purpose.RESIDUAL, 1)[:, 0],
        )

    def _coupled(self, logits: Tensor, draft_ids: Tensor, rows: Rows) -> Verified:
        assert self.coupled_filters is not None
        keys, positions = self.coupled_keys[rows.owner], self.coupled_positions[rows.owner] + rows.slot
        choices = distributions(logits, self.coupled_filters.rows(rows.owner)).couple(keys, positions)
        return verify_choices(choices, draft_ids, rows.start, rows.lens)

    def _uniform(self, purpose: Purpose, slots: int) -> Tensor:
        """[len(ratio), slots] numbers of this round."""
        return round_uniform(self.ratio_keys, self.ratio_rounds, purpose, slots)

    def _draft_u(self, slot: int) -> Tensor:
        """[len(ratio)] numbers of a slot; made for many slots at once, since each call costs as much."""
        if len(self._draft_numbers) <= slot:
            self._draft_numbers = self._uniform(Purpose.DRAFT, 2 * slot + 16).T.contiguous()
        return self._draft_numbers[slot]

    def _adjust_draft(self, logits: Tensor, draft_ids: Tensor) -> Tensor:
        if not self.adjustments:
            return logits
        logits = logits.clone()
        for i, adjust in self.adjustments.items():
            adjust.apply_(logits[i : i + 1], draft_ids[i], first=draft_ids.shape[1])
        return logits

    def _adjust_target(self, logits: Tensor, draft_ids: Tensor, verify_lens: Sequence[int]) -> Tensor:
        """Each row sees the tokens before it, earlier slots of its own block included."""
        if not self.adjustments:
            return logits
        logits = logits.clone()
        for i, adjust in self.adjustments.items():
            start = sum(verify_lens[:i]) + i
            adjust.apply_(logits[start : start + verify_lens[i] + 1], draft_ids[i, : verify_lens[i]])
        return logits


class Rows:
    """Which flat row of the target belongs to which request: l + 1 rows each, one after the other.

    Attributes:
        lens, start: [R] admitted drafts and first row of each request.
        owner, slot: [sum(l + 1)] request and place in its block of each row.
        longest: the largest l.
    """

    def __init__(self, verify_lens: Sequence[int], device: torch.device) -> None:
        self.verify_lens, self.longest = verify_lens, max(verify_lens)
        start = [0, *accumulate(length + 1 for length in verify_lens)][:-1]
        self.lens, self.start = tensor_on(device, [verify_lens, start])

    @cached_property
    def _of_rows(self) -> Tensor:
        pairs = [(owner, slot) for owner, length in enumerate(self.verify_lens) for slot in range(length + 1)]
        return tensor_on(self.lens.device, pairs)

    @property
    def owner(self) -> Tensor:
        return self._of_rows[:, 0]

    @property
    def slot(self) -> Tensor:
        return self._of_rows[:, 1]


def warm_up(device: torch.device) -> None:
    """Go through all rules once: the first request should not wait for what is compiled at its first use."""
    kinds = SamplingParams(temperature=0), SamplingParams(top_k=2), SamplingParams(seed=0)
    this, scores = Round([RowSource(params, 0, 0, 0) for params in kinds], device), torch.zeros(6, 16, device=device)
    ids = this(0, scores[:3], torch.empty(3, 0, dtype=torch.int64, device=device))
    this.verify(scores, ids.unsqueeze(-1), [1, 1, 1])
