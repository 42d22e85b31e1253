"""What became of a round's draft, token by token, for clients that want to look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Source = Literal["accepted", "corrected", "bonus", "plain"]


class TokenText(NamedTuple):
    """A delivered token, and the text that it completed."""

    token_id: int
    text: str


@dataclass(frozen=True)
class RoundDetail:
    """One round of one request.

    Attributes:
        draft_ids: what was proposed; empty in a plain step.
        confidence: probability of each proposal to stand if those before it do, or None where nobody knows.
        verified: how many proposals were sent to the target.
        accepted: how many of them stood and were delivered.
        tokens: what was delivered.
    """

    draft_ids: Sequence[int]
    confidence: Sequence[float | None] | None
    verified: int
    accepted: int
    tokens: Sequence[TokenText]

    @property
    def sources(self) -> list[Source]:
        """Where each delivered token comes from."""
        stood: list[Source] = ["accepted"] * self.accepted
        after: Source = "plain"
        if self.verified:
            after = "corrected" if self.accepted < self.verified else "bonus"  # by the target, where a draft fell
        return [*stood, *[after] * (len(self.tokens) - self.accepted)]
