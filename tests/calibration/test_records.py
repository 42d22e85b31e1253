"""Records: what is known of each slot, and splits that never cut a prompt in two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from calibration.records import Records, joined, split_by_prompt

NAN = float("nan")


def records_of(rounds: list[tuple[list[float], int, int]], domains: tuple[str, ...] = ("a",)) -> Records:
    """Of (logits, decided, accepted), each of its own prompt."""
    count = len(rounds)
    return Records(
        logits=np.array([logits for logits, _, _ in rounds]),
        decided=np.array([decided for _, decided, _ in rounds]),
        accepted=np.array([accepted for _, _, accepted in rounds]),
        temperature=np.ones(count),
        regime=np.ones(count, np.int64),
        domain=np.zeros(count, np.int64),
        prompt=np.arange(count),
        domains=domains,
    )


@pytest.mark.parametrize(
    ("logits", "decided", "accepted", "known", "survived"),
    [
        # All three stand.
        ([0.0, 0.0, 0.0], 3, 3, [1, 1, 1], [1, 1, 1]),
        # The second was rejected: the third was not judged, but its block did not survive to it.
        ([0.0, 0.0, 0.0], 2, 1, [1, 1, 1], [1, 0, 0]),
        ([0.0, 0.0, 0.0], 1, 0, [1, 1, 1], [0, 0, 0]),
        # The text ended after the first: nobody knows of the others.
        ([0.0, 0.0, 0.0], 1, 1, [1, 0, 0], [1, 0, 0]),
        ([0.0, 0.0, 0.0], 0, 0, [0, 0, 0], [0, 0, 0]),
        # The third was not drafted.
        ([0.0, 0.0, NAN], 2, 2, [1, 1, 0], [1, 1, 0]),
        ([0.0, 0.0, NAN], 1, 0, [1, 1, 0], [0, 0, 0]),
        # A saturated logit is one.
        ([np.inf, -np.inf, 0.0], 2, 1, [1, 1, 1], [1, 0, 0]),
    ],
)
def test_what_is_known_and_what_survived(
    logits: list[float], decided: int, accepted: int, known: list[int], survived: list[int]
) -> None:
    records = records_of([(logits, decided, accepted)])
    assert records.known.tolist() == [[bool(k) for k in known]]
    assert records.survived.tolist() == [[bool(s) for s in survived]]
    assert records.draft_len == 3


def many(num_prompts: int, rounds: int, seed: int = 0) -> Records:
    """Rounds in random order; the prompts of three domains share their numbers."""
    source, count = np.random.default_rng(seed), num_prompts * rounds * 3
    order = source.permutation(count)
    accepted = source.integers(0, 3, count)
    return Records(
        logits=np.arange(2.0 * count).reshape(count, 2),
        decided=np.minimum(accepted + 1, 2),
        accepted=accepted,
        temperature=source.random(count),
        regime=source.integers(0, 3, count),
        domain=np.arange(count)[order] % 3,
        prompt=(np.arange(count) // 3 % num_prompts)[order],
        domains=("chat", "code", "math"),
    )


def test_of_takes_the_same_rounds_everywhere() -> None:
    records = many(5, 4)
    chosen = np.array([7, 3])
    for part in (records.of(chosen), records.of(np.isin(np.arange(60), chosen)).of(np.array([1, 0]))):
        assert len(part) == 2
        assert part.domains == records.domains
        for name in ("logits", "decided", "accepted", "temperature", "regime", "domain", "prompt"):
            assert np.array_equal(getattr(part, name), getattr(records, name)[[7, 3]]), name
    assert len(records.of(records.regime == 5)) == 0


def test_parts_joined_are_the_whole() -> None:
    records = many(5, 4)
    whole = joined([records.of(np.arange(20)), records.of(np.arange(20, 60))])
    assert whole.domains == records.domains
    for name in ("logits", "decided", "accepted", "temperature", "regime", "domain", "prompt"):
        assert np.array_equal(getattr(whole, name), getattr(records, name)), name


def test_records_of_other_domains_are_not_joined() -> None:
    records = many(2, 1)
    with pytest.raises(AssertionError):
        joined([records, replace(records, domains=("x", "y", "z"))])


def prompts(records: Records) -> set[tuple[int, int]]:
    return set(zip(records.domain.tolist(), records.prompt.tolist(), strict=True))


def test_a_split_keeps_prompts_whole_and_shares_out_each_domain() -> None:
    records = many(10, 4)
    fitted, judged = split_by_prompt(records, 0.3)
    assert not prompts(fitted) & prompts(judged)
    assert prompts(fitted) | prompts(judged) == prompts(records)
    assert len(fitted) + len(judged) == len(records)
    assert [sum(domain == d for d, _ in prompts(judged)) for domain in range(3)] == [3, 3, 3]
    rows = np.concatenate((fitted.logits[:, 0], judged.logits[:, 0]))
    assert sorted(rows) == records.logits[:, 0].tolist()


def test_a_split_takes_its_share_of_small_domains_too() -> None:
    prompt = np.arange(120)
    records = records_of([([0.0], 1, 1)] * 120, domains=("small", "large"))
    records = replace(records, prompt=prompt, domain=(prompt >= 20).astype(np.int64))
    _, judged = split_by_prompt(records, 0.1)
    assert np.bincount(judged.domain).tolist() == [2, 10]


def test_a_split_repeats_with_its_seed() -> None:
    records = many(10, 4)
    first, again, other = (prompts(split_by_prompt(records, 0.3, seed)[1]) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (1.0, 30)])
def test_a_split_may_leave_a_side_empty(share: float, count: int) -> None:
    assert len(prompts(split_by_prompt(many(10, 2), share)[1])) == count
