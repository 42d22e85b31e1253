"""Records of verified blocks: what the confidence head said of each slot, and what became of it.

A record is one round of one request, drafted and verified in full. Slots after the first rejection were never judged
on their own, but their block did not survive to them; slots after the end of a text are unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from dspark_core.arrays import Bools, Floats, Ints


@dataclass(frozen=True)
class Records:
    """N rounds of blocks of up to K slots.

    Attributes:
        logits: [N, K] raw confidence logits; NaN in slots that were not drafted.
        decided: [N] slots judged: those accepted and the one rejected, none after the end of the text.
        accepted: [N] slots that stand.
        temperature: [N] of the request's sampling, 0 for greedy.
        regime: [N] index into `dspark_core.sampling.REGIMES`.
        domain: [N] index into `domains`.
        prompt: [N] number of the prompt; a split never cuts one in two.
        domains: names.
    """

    logits: Floats
    decided: Ints
    accepted: Ints
    temperature: Floats
    regime: Ints
    domain: Ints
    prompt: Ints
    domains: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.decided)

    @property
    def draft_len(self) -> int:
        return int(self.logits.shape[1])

    @property
    def known(self) -> Bools:
        """[N, K] whether it is known that the drafts up to this slot were all accepted, or that they were not."""
        slots, drafted = np.arange(self.draft_len), ~np.isnan(self.logits)
        rejected = (self.decided > self.accepted)[:, None]
        return drafted & ((slots < self.decided[:, None]) | rejected)

    @property
    def survived(self) -> Bools:
        """[N, K] whether the drafts up to this slot were all accepted; meaningful where `known`."""
        return np.arange(self.draft_len) < self.accepted[:, None]

    def of(self, chosen: Bools | Ints) -> Records:
        """The chosen rounds."""
        arrays = {f.name: getattr(self, f.name)[chosen] for f in fields(self) if f.name != "domains"}
        return replace(self, **arrays)


def joined(parts: Sequence[Records]) -> Records:
    """Records one after the other; all must name the same domains."""
    assert len({part.domains for part in parts}) == 1
    arrays = {
        f.name: np.concatenate([getattr(part, f.name) for part in parts])
        for f in fields(Records)
        if f.name != "domains"
    }
    return Records(**arrays, domains=parts[0].domains)


def split_by_prompt(records: Records, held_out: float, seed: int = 0) -> tuple[Records, Records]:
    """Records to fit on and records to judge by: all rounds of a prompt on one side, each domain's prompts shared out.

    Args:
        held_out: share of the prompts to judge by.
    """
    source, judged = np.random.default_rng(seed), np.zeros(len(records), bool)
    for domain in range(len(records.domains)):
        prompts = np.unique(records.prompt[records.domain == domain])
        chosen = source.permutation(prompts)[: round(len(prompts) * held_out)]
        judged |= np.isin(records.prompt, chosen) & (records.domain == domain)
    return records.of(~judged), records.of(judged)
