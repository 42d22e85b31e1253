"""The whole path draft, verify, next round says what plain sampling says: joint distributions of several tokens.

Each test also has its control: the same statistic on a biased procedure, which must fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark_core.randomness import derive_key
from dspark_core.sampling import SamplingParams
from tests.core.slow import Played, chi_square_p, exact_joint, play, slow_probabilities

VOCAB, COUNT = 4, 8_000
# Keys are fixed, so a run always sees the same numbers; sound code fails one in 10 000 of such tests.
LEAST_P = 1e-4
BIASED_P = 1e-9


def table(seed: int, spread: float = 1.2, vocab: int = VOCAB) -> Tensor:
    """[V, V] logits of what follows each token."""
    return spread * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))


@cache
def keys(count: int, name: str = "distribution") -> list[int]:
    return [derive_key(name, i) for i in range(count)]


def sample(
    target: Tensor, draft: Tensor, params: SamplingParams, *, count: int = COUNT, num_tokens: int = 3, **options: Any
) -> Played:
    return play(target, draft, [params] * count, keys(count), num_tokens=num_tokens, **options)


def coins(sides: int) -> Callable[[Tensor], list[int]]:
    """Verify lengths that have nothing to do with what was drafted."""
    source = random.Random(0)
    return lambda drafted: [source.randrange(sides) for _ in drafted]


RULES: dict[str, dict[str, Any]] = {"ratio": {}, "coupled": {"seed": 1}}
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature 0.6": {"temperature": 0.6},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.3, "temperature": 1.3},
    "all filters": {"top_k": 3, "top_p": 0.9, "min_p": 0.1, "temperature": 0.8},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_three_tokens_are_distributed_as_the_target_says(settings: str, rule: str) -> None:
    """Cases B1, B4 and B6."""
    params = SamplingParams(**SETTINGS[settings], **RULES[rule])
    target, draft = table(1), table(2)
    played = sample(target, draft, params, draft_len=2)
    assert 0.05 < played.accepted / (2 * played.rounds) < 0.95, "both acceptance and rejection must be common"
    assert chi_square_p(played.tokens, exact_joint(target, params, 3)) > LEAST_P


@pytest.mark.parametrize("rule", RULES)
def test_control_another_distribution_is_told_apart(rule: str) -> None:
    params = SamplingParams(**RULES[rule])
    played = sample(table(1), table(2), params, draft_len=2)
    assert chi_square_p(played.tokens, exact_joint(table(2), params, 3)) < BIASED_P, "the draft's"
    nearly = table(1) + 0.1 * table(3)
    assert chi_square_p(played.tokens, exact_joint(nearly, params, 3)) < BIASED_P, "one a little off"


@pytest.mark.parametrize("rule", RULES)
def test_penalties_act_inside_a_block(rule: str) -> None:
    """Case B8: each row sees the tokens before it, accepted ones of its own block included."""
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=0.6, repetition_penalty=1.4, **RULES[rule])
    target, draft = table(4, vocab=3), table(5, vocab=3)
    played = sample(target, draft, params, count=1000, draft_len=2)
    assert chi_square_p(played.tokens, exact_joint(target, params, 3)) > LEAST_P
    assert chi_square_p(played.tokens, exact_joint(target, SamplingParams(), 3)) < BIASED_P, "without penalties"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft_len", [0, 1, 4])
def test_any_block_length_gives_the_same_distribution(draft_len: int, rule: str) -> None:
    params = SamplingParams(**RULES[rule])
    played = sample(table(1), table(2), params, draft_len=draft_len)
    assert chi_square_p(played.tokens, exact_joint(table(1), params, 3)) > LEAST_P


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("settings", ["temperature 1", "all filters"])
@pytest.mark.parametrize("kernels", [True, False])
def test_a_draft_that_computes_no_numbers_is_only_a_bad_draft(
    kernels: bool, settings: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case S3, of a draft: its tokens are not drawn from any distribution, so none of them may stand by chance."""
    if not kernels:
        for module in ("sampling", "distributions", "verify"):
            monkeypatch.setattr(f"dspark_core.{module}.in_kernels", lambda rows: False)
    draft, params = table(2), SamplingParams(**SETTINGS[settings], **RULES[rule])
    draft[1, 3], draft[2], draft[3, 0] = torch.inf, -torch.inf, torch.nan
    played = sample(table(1), draft, params, draft_len=2)
    assert played.accepted > 0, "what follows token 0 is drafted as ever"
    assert chi_square_p(played.tokens, exact_joint(table(1), params, 3)) > LEAST_P


def test_lengths_drawn_before_drafting_are_harmless() -> None:
    played = sample(table(1), table(2), SamplingParams(), draft_len=3, choose_lens=coins(4))
    assert chi_square_p(played.tokens, exact_joint(table(1), SamplingParams(), 3)) > LEAST_P


def test_lengths_that_look_at_earlier_tokens_of_the_block_are_harmless() -> None:
    """Admission of slot k may depend on what was drafted before it (Algorithm 1), not on x_k."""

    def earlier(drafted: Tensor) -> list[int]:
        return [3 if first == 1 else 1 for first in drafted[:, 0].tolist()]

    played = sample(table(1), table(2), SamplingParams(), draft_len=3, choose_lens=earlier)
    assert chi_square_p(played.tokens, exact_joint(table(1), SamplingParams(), 3)) > LEAST_P


# Appendix A: the target says token 0 with 0.70, the draft with 0.50. If the drafted token is verified only when it is
# token 0, then 0.5 of the requests propose it and keep it, and the others draw afresh: 0.5 + 0.5 * 0.70 = 0.85.
TARGET_A = torch.tensor([[0.7, 0.3]] * 2).log()
DRAFT_A = torch.tensor([[0.5, 0.5]] * 2).log()


def admit_what_looks_good(drafted: Tensor) -> list[int]:
    return [1 if token == 0 else 0 for token in drafted[:, 0].tolist()]


def test_negative_control_of_appendix_a() -> None:
    """The biased early choice says 0.85 instead of 0.70, and fails the very test that the honest one passes."""
    params, joint = SamplingParams(), exact_joint(TARGET_A, SamplingParams(), 2)
    honest = sample(TARGET_A, DRAFT_A, params, num_tokens=2, draft_len=1)
    biased = sample(TARGET_A, DRAFT_A, params, num_tokens=2, draft_len=1, choose_lens=admit_what_looks_good)
    first = [float((played.tokens[:, 0] == 0).double().mean()) for played in (honest, biased)]
    deviation = (0.7 * 0.3 / COUNT) ** 0.5
    assert abs(first[0] - 0.70) < 4 * deviation
    assert abs(first[1] - 0.85) < 4 * deviation
    assert chi_square_p(honest.tokens, joint) > LEAST_P
    assert chi_square_p(biased.tokens, joint) < BIASED_P


def test_the_coupled_rule_is_immune_to_the_biased_choice() -> None:
    params = SamplingParams(seed=1)
    biased = sample(TARGET_A, DRAFT_A, params, num_tokens=2, draft_len=1, choose_lens=admit_what_looks_good)
    assert chi_square_p(biased.tokens, exact_joint(TARGET_A, params, 2)) > LEAST_P


def test_coupled_text_does_not_depend_on_the_draft() -> None:
    """Nor on the block length, nor on how far blocks are verified; the same seed says the same text."""
    target, vocab = table(6, vocab=40), 40
    params = [SamplingParams(seed=i, temperature=0.9, top_p=0.95) for i in range(12)]
    plain = play(target, target, params, keys(12), num_tokens=20, draft_len=0).tokens
    for draft in (target, table(7, vocab=vocab), torch.zeros(vocab, vocab), -target):
        for draft_len in (1, 3, 7):
            played = play(target, draft, params, keys(12), num_tokens=20, draft_len=draft_len)
            assert torch.equal(played.tokens, plain)
    any_length = play(target, table(7, vocab=vocab), params, keys(12), num_tokens=20, draft_len=3, choose_lens=coins(4))
    assert torch.equal(any_length.tokens, plain)
    others = play(target, target, params, keys(12, "other"), num_tokens=20, draft_len=0).tokens
    assert not (others == plain).all(-1).any(), "other keys say something else"


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_acceptance_rates(seed: int) -> None:
    """Ratio accepts with exactly 1 - TV; coupled with at least (1 - TV) / (1 + TV)."""
    target, draft = table(seed, vocab=8), table(seed, vocab=8) + 0.7 * table(seed + 100, vocab=8)
    p, q = (torch.tensor(slow_probabilities(rows[0].tolist(), SamplingParams())) for rows in (target, draft))
    distance = 0.5 * float((p - q).abs().sum())
    rates = {}
    for rule, extra in RULES.items():
        played = sample(target, draft, SamplingParams(**extra), num_tokens=1, draft_len=1)
        rates[rule] = played.accepted / played.rounds
    deviation = 0.5 / COUNT**0.5
    assert 0.1 < distance < 0.5
    assert abs(rates["ratio"] - (1 - distance)) < 4 * deviation
    assert rates["coupled"] > (1 - distance) / (1 + distance) - 4 * deviation
    assert rates["coupled"] < 1 - distance + 4 * deviation, "no coupling can beat 1 - TV"
