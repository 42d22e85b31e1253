"""A draft that costs what the real one costs, and is right as often as a script says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from dspark_core.draft.drafter import Choose, DraftBlock, Drafter, Drafts
from dspark_core.sampling import Regime
from server.engine import Engine
from server.request import Request

# Right slots of a request's block, and confidence logits of its slots, from the token of the answer it begins at.
Script = Callable[[Request, int], tuple[int, Sequence[float]]]
WRONG = 0.25  # share of slots in which the confidence of `coins` points the wrong way


class ScriptedDrafter(Drafter):
    """Proposes the true continuation up to a place, and a wrong token from there on. For greedy requests.

    Args:
        engine: whose draft it stands in for, and costs as much as.
        answers: what plain decoding answers, by prompt ids.
    """

    def __init__(self, engine: Engine, answers: dict[tuple[int, ...], list[int]], script: Script) -> None:
        assert engine.drafter is not None
        super().__init__(engine.drafter.model, engine.drafter.pool)
        self.engine, self.answers, self.script = engine, answers, script

    def draft(self, blocks: Sequence[DraftBlock], choose: Choose) -> Drafts:
        drafts = super().draft(blocks, choose)
        by_pages = {id(request.table.pages): request for request in self.engine.scheduler.running}
        for row, block in enumerate(blocks):
            request = by_pages[id(block.pages)]
            answer, start = self.answers[tuple(request.prompt_ids)], request.num_generated
            right, logits = self.script(request, start)
            for slot, token in enumerate(answer[start : start + block.num_slots]):
                drafts.draft_ids[row, slot] = token if slot < right else (token + 1) % 1000
            if drafts.confidence_logits is not None:
                size = drafts.confidence_logits.shape[1]
                drafts.confidence_logits[row] = torch.tensor(logits[:size])
        return drafts


def acceptance(chances: Sequence[float], draft_len: int) -> dict[Regime, tuple[float, ...]]:
    """What calibrating such a draft would find: acceptance by position, given that all before it were accepted."""
    survival = np.power.outer(np.array(chances), np.arange(draft_len + 1.0)).mean(0)
    return {"ratio": tuple((survival[1:] / survival[:-1]).tolist())}


def coins(chances: Sequence[float], draft_len: int) -> Script:
    """Slots are right by independent coins, of another chance for one prompt and the next; the confidence is calibrated
    and tells right from wrong better than chance.

    The same token of the same answer always gets the same coins, whoever asks.
    """

    def script(request: Request, start: int) -> tuple[int, Sequence[float]]:
        place = sum(request.prompt_ids) % len(chances)
        chance, source = chances[place], np.random.default_rng([sum(request.prompt_ids), start])
        right = source.random(draft_len) < chance
        hint = right ^ (source.random(draft_len) < WRONG)
        good, bad = (
            np.log(chance * a / ((1 - chance) * (1 - a))) for a in (1 - WRONG, WRONG)
        )  # P(right | hint), as odds
        run = int(np.argmin(np.append(right, False)))
        return run, np.where(hint, good, bad).tolist()

    return script
