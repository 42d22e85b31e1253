"""Sampled tokens follow the target's exact distribution through the whole engine, and a lying draft is caught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import entr, softmax
from scipy.stats import chisquare

from dspark_core.sampling import SamplingParams
from server.policy import LengthPolicy
from server.request import RequestParams
from tests.server.drafts import LyingDrafter, TableDrafter
from tests.server.engines import make_engine, run, target_logits, tiny_target

V = 10
DRAFT_LEN = 2
# One token with the prompt, then a round of two slots and its corrected or bonus token.
COUNT = 4
NUM_REQUESTS = 2500
BATCH = 64
# The seeds are fixed, so this is no rate of false alarms: what is exact lies far above, what is biased far below.
P_VALUE = 1e-3
RATIO = SamplingParams(temperature=1.0)
Floats = NDArray[np.float64]


@cache
def prompt() -> list[int]:
    """The one of many prompts whose next two tokens are least certain."""

    def entropy(ids: list[int]) -> float:
        first = softmax(target_logits(ids, tiny_target(V))[-1])
        second = [softmax(target_logits([*ids, token], tiny_target(V))[-1]) for token in range(V)]
        return float(entr(first).sum() + (first * [entr(row).sum() for row in second]).sum())

    return max(([5, a, b] for a in range(2, 6) for b in range(2, 6)), key=entropy)


def draw_texts(
    drafter: TableDrafter,
    sampling: SamplingParams,
    num: int = NUM_REQUESTS,
    policy: LengthPolicy | None = None,
    seed: int = 0,
    count: int = COUNT,
    **memory: int,
) -> NDArray[np.int64]:
    """[num, count] tokens of as many requests; seeded ones differ in their seed.

    Args:
        memory: num_tokens that are too few for so many requests.
    """
    limits = {"max_num_seqs": BATCH, "max_num_batched_tokens": BATCH * 8, **memory}
    engine = make_engine(drafter, target=tiny_target(V), seed=seed, **limits)
    engine.policy = policy or engine.policy
    own = [sampling if sampling.seed is None else replace(sampling, seed=seed) for seed in range(num)]
    jobs = [(prompt(), RequestParams(params, max_tokens=count)) for params in own]
    results = run(engine, jobs)
    if policy is None:
        assert sum(result.last.speculation.rounds for result in results) >= num
    assert not memory or engine.scheduler.num_preemptions > num // 10
    return np.array([result.ids for result in results])


@cache
def exact(sampling: SamplingParams) -> Floats:
    """[V, V, V]: probability of the first three tokens, by enumeration and with filters written out anew."""
    joint = np.zeros((V, V, V))
    first = distribution([], sampling)
    for a in range(V):
        second = distribution([a], sampling)
        for b in range(V):
            joint[a, b] = first[a] * second[b] * distribution([a, b], sampling)
    return joint


def distribution(output: Sequence[int], sampling: SamplingParams) -> Floats:
    logits = target_logits([*prompt(), *output], tiny_target(V))[-1].double().numpy().copy()
    for token in set(prompt()) | set(output):
        logits[token] *= sampling.repetition_penalty ** (-1 if logits[token] > 0 else 1)
    for token in set(output):
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    probs = np.exp((logits - logits.max()) / sampling.temperature)
    order = np.argsort(-probs)
    kept = order[: sampling.top_k or V]
    mass = probs[kept].cumsum() / probs[kept].sum()
    kept = kept[: np.searchsorted(mass, sampling.top_p) + 1]
    kept = kept[probs[kept] >= sampling.min_p * probs.max()]
    filtered: Floats = np.zeros(V)
    filtered[kept] = probs[kept] / probs[kept].sum()
    return filtered


def p_value(observed: NDArray[np.int64], probs: Floats) -> float:
    """Chi-square of counts against probabilities; cells that expect fewer than 5 are taken together."""
    expected = probs.ravel() * observed.sum()
    counts = observed.ravel()
    assert counts[expected == 0].sum() == 0, "a token that the filters exclude was emitted"
    rare = expected < 5
    pooled = [np.append(cells[~rare], cells[rare].sum()) for cells in (counts, expected)]
    if pooled[1][-1] == 0:
        pooled = [cells[:-1] for cells in pooled]
    return float(chisquare(*pooled).pvalue)


def p_values(texts: NDArray[np.int64], sampling: SamplingParams) -> list[float]:
    """Of tokens 1 and 2, of tokens 2 and 3, and of all three together."""
    observed = np.zeros((V, V, V), dtype=np.int64)
    np.add.at(observed, tuple(texts[:, :3].T), 1)
    joint = exact(sampling)
    marginals = [(observed.sum(axis), joint.sum(axis)) for axis in (2, 0)]
    return [p_value(*pair) for pair in [*marginals, (observed, joint)]]


@pytest.mark.parametrize(
    "sampling",
    [
        RATIO,
        SamplingParams(temperature=1.0, seed=0),
        SamplingParams(temperature=0.7, top_k=6, top_p=0.9, min_p=0.02),
        SamplingParams(temperature=1.3, presence_penalty=0.5, frequency_penalty=0.8, repetition_penalty=1.5),
    ],
    ids=["ratio", "coupled", "ratio-filtered", "ratio-penalised"],
)
def test_sampled_text_follows_the_target(sampling: SamplingParams) -> None:
    """Cases B1, B4, B6 and B7."""
    texts = draw_texts(TableDrafter(DRAFT_LEN, tiny_target(V)), sampling)
    assert len({tuple(text) for text in texts}) > 20
    assert min(p_values(texts, sampling)) > P_VALUE


def test_sampled_text_of_the_preempted_follows_the_target() -> None:
    """Case F6: what they said is kept, and what they draw afterwards is nothing that was drawn before."""
    texts = draw_texts(TableDrafter(DRAFT_LEN, tiny_target(V)), RATIO, 1500, count=20, num_tokens=18 * BATCH)
    assert min(p_values(texts, RATIO)) > P_VALUE


def test_a_draft_that_lies_about_its_distribution_fails_the_same_test() -> None:
    """Case B1."""
    texts = draw_texts(LyingDrafter(DRAFT_LEN, tiny_target(V)), RATIO, 1000)
    assert p_values(texts, RATIO)[0] < 1e-9


def test_the_coupled_rule_forgives_a_draft_that_lies() -> None:
    """There the draft's distribution takes no part: what is emitted is the target's own choice."""
    sampling = SamplingParams(temperature=1.0, seed=0)
    lying = draw_texts(LyingDrafter(DRAFT_LEN, tiny_target(V)), sampling, BATCH)
    honest = draw_texts(TableDrafter(DRAFT_LEN, tiny_target(V)), sampling, BATCH)
    assert np.array_equal(lying, honest)
