"""Sampled text follows the target's distribution among what a grammar allows; by chi-square, with faults that fail."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import softmax

from dspark_core.adjustments import Adjustments
from dspark_core.sampling import SamplingParams
from server.request import RequestParams
from tests.server.drafts import LyingDrafter, TableDrafter
from tests.server.engines import AnyDrafter, TinyTarget, make_engine, run, target_logits, tiny_target
from tests.server.test_engine_distribution import BATCH, P_VALUE, Floats, V, p_value, prompt

EOS = 1
# Tokens 2 to 9 are the characters from the blank on. What may follow depends on what came before.
RULES = "( [ -']|[!\"#][$%&])([!$] | [ -'])"


def exact_joint(target: TinyTarget) -> Floats:
    """[V, V, V] by enumeration, with Python's own idea of the grammar."""
    pattern = re.compile(RULES)
    texts = ["".join(map(chr, row)) for row in np.ndindex(8, 8, 8, 8)]
    whole = [
        text for text in (text.translate({i: i + 32 for i in range(8)}) for text in texts) if pattern.fullmatch(text)
    ]
    joint = np.zeros((V, V, V))

    def allowed(output: tuple[int, ...]) -> list[int]:
        start = "".join(chr(token + 30) for token in output)
        return sorted({ord(text[len(output)]) - 30 for text in whole if text.startswith(start)})

    def distribution(output: tuple[int, ...]) -> dict[int, float]:
        logits = target_logits([*prompt(), *output], target)[-1].double().numpy()
        left = allowed(output)
        return dict(zip(left, softmax(logits[left]).tolist(), strict=True))

    for a, pa in distribution(()).items():
        for b, pb in distribution((a,)).items():
            for c, pc in distribution((a, b)).items():
                joint[a, b, c] = pa * pb * pc
    return joint


def fits(texts: NDArray[np.int64]) -> bool:
    observed = np.zeros((V, V, V), dtype=np.int64)
    np.add.at(observed, tuple(texts[:, :3].T), 1)
    joint = exact_joint(tiny_target(V))
    assert 0.9999 < joint.sum() < 1.0001
    if observed[joint == 0].any():
        return False
    return min(p_value(observed.sum(axis), joint.sum(axis)) for axis in (0, 2)) > P_VALUE


@pytest.mark.parametrize(
    ("fault", "seed"),
    [(None, None), (None, 0), ("first row alone", None), ("first row alone", 0), ("a draft that lies", None)],
)
def test_sampled_text_follows_the_targets_masked_distribution(
    monkeypatch: pytest.MonkeyPatch, fault: str | None, seed: int | None
) -> None:
    drafter: AnyDrafter = TableDrafter(2, tiny_target(V))
    if fault == "first row alone":
        look = Adjustments._mask_after
        monkeypatch.setattr(Adjustments, "_mask_after", lambda self, constraint, block: look(self, constraint, ()))
    elif fault:
        drafter = LyingDrafter(2, tiny_target(V))
    target = tiny_target(V)
    engine = make_engine(drafter, target=target, eos=[EOS], max_num_seqs=BATCH, max_num_batched_tokens=BATCH * 8)
    grammar = engine.grammars.compile("regex", RULES)
    count = 400 if fault == "first row alone" else 1200
    own = [SamplingParams(seed=None if seed is None else i) for i in range(count)]
    results = run(engine, [(prompt(), RequestParams(s, max_tokens=6, grammar=grammar)) for s in own])
    assert fits(np.array([result.ids[:3] for result in results])) == (fault is None)
