"""Random numbers as pure functions of key and counters: the same everywhere, and random enough."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from dspark_core.randomness import Purpose, bits, derive_key, gumbel, round_uniform, uniform

COUNT = 50_000
# Seeded, so the tests below always see the same numbers; a sound generator fails one in 10 000 such tests.
LEAST_P = 1e-4


def keys_of(count: int) -> Tensor:
    return torch.tensor([derive_key("test", i) for i in range(count)])


def one_key(*parts: int | str) -> Tensor:
    return torch.tensor([derive_key(*parts)])


STREAMS = {
    "consecutive counters": lambda: uniform(one_key(7), torch.arange(COUNT)),
    "second counters": lambda: uniform(one_key(7), 3, torch.arange(COUNT)),
    "keys of consecutive seeds": lambda: uniform(torch.tensor([derive_key("seed", i, 0) for i in range(COUNT)]), 1, 1),
    "keys that are small numbers": lambda: uniform(torch.arange(COUNT), 0),
    "large counters": lambda: uniform(one_key(7), torch.arange(COUNT) + 2**40),
}


@pytest.mark.parametrize("name", STREAMS)
def test_uniform_numbers_are_uniform_and_independent(name: str) -> None:
    u = STREAMS[name]()
    assert u.dtype == torch.float64
    assert ((u >= 0) & (u < 1)).all()
    assert stats.kstest(u.numpy(), "uniform").pvalue > LEAST_P
    pairs = (u[:-1] * 16).long() * 16 + (u[1:] * 16).long()
    assert stats.chisquare(torch.bincount(pairs, minlength=256).numpy()).pvalue > LEAST_P, "neighbours"
    low = bits(one_key(7), torch.arange(COUNT)) & 255
    assert stats.chisquare(torch.bincount(low, minlength=256).numpy()).pvalue > LEAST_P, "low bits"


@pytest.mark.parametrize(
    ("first", "second"),
    [(a, b) for a in Purpose for b in Purpose if a < b],
)
def test_purposes_are_independent_streams(first: Purpose, second: Purpose) -> None:
    """Draft, acceptance and residual draws of the same round and slot."""
    keys = keys_of(4000).unsqueeze(-1)
    rounds = torch.arange(4).unsqueeze(0)
    a, b = (uniform(keys, rounds, int(p), 0).flatten() for p in (first, second))
    pairs = (a * 8).long() * 8 + (b * 8).long()
    assert stats.chisquare(torch.bincount(pairs, minlength=64).numpy()).pvalue > LEAST_P


def test_gumbel_noise_follows_its_distribution() -> None:
    noise = gumbel(one_key(3), int(Purpose.NOISE), 17, torch.arange(COUNT))
    assert noise.dtype == torch.float64
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > LEAST_P


def test_gumbel_noise_is_finite_at_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    monkeypatch.setattr("dspark_core.randomness.bits", lambda *_: ends)
    assert gumbel(torch.zeros(4, dtype=torch.int64)).isfinite().all()
    assert (uniform(torch.zeros(4, dtype=torch.int64)) < 1).all()


def test_arg_max_of_noise_chooses_uniformly() -> None:
    noise = gumbel(keys_of(20_000).unsqueeze(-1), int(Purpose.NOISE), 5, torch.arange(6))
    counts = torch.bincount(noise.argmax(-1), minlength=6)
    assert stats.chisquare(counts.numpy()).pvalue > LEAST_P


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("vocab", [5, 83, 1001, 49152])
def test_a_number_depends_on_its_key_and_counters_alone(vocab: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        keys, tokens = keys_of(9), torch.arange(vocab)
        whole = gumbel(keys.unsqueeze(-1), int(Purpose.NOISE), torch.arange(9).unsqueeze(-1), tokens)
        for row in (0, 1, 4, 8):
            alone = gumbel(keys[row : row + 1].unsqueeze(-1), int(Purpose.NOISE), torch.tensor([[row]]), tokens)
            assert torch.equal(alone[0], whole[row])
            some = gumbel(keys[row : row + 1], int(Purpose.NOISE), row, tokens[3:5])
            assert torch.equal(some, whole[row, 3:5])
    finally:
        torch.set_num_threads(before)


def test_the_global_stream_plays_no_part() -> None:
    state = torch.random.get_rng_state()
    first = uniform(one_key(1), torch.arange(10))
    torch.rand(5)
    assert torch.equal(uniform(one_key(1), torch.arange(10)), first)
    torch.random.set_rng_state(state)
    uniform(one_key(1), torch.arange(10))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_counters_given_as_numbers_and_as_tensors_are_the_same() -> None:
    key = one_key(9)
    for counter in (0, 1, 4, 12345, 2**40):
        assert torch.equal(bits(key, counter, 7), bits(key, torch.tensor([counter]), torch.tensor(7)))


def test_the_order_of_counters_matters() -> None:
    key = one_key(9)
    assert not torch.equal(bits(key, 1, 2), bits(key, 2, 1))
    assert not torch.equal(bits(key, 1), bits(key, 1, 0))


def test_keys_differ_with_every_part_and_fit_an_int64() -> None:
    parts: list[tuple[int | str, ...]] = [("seed", i, j) for i in range(40) for j in range(5)]
    parts += [("request", 1, 2), ("seed", 12), ("seed", "1", "2"), ("seed1", 2), ()]
    keys = {derive_key(*p) for p in parts}
    assert len(keys) == len(parts) - 1, "only 1 and '1' may be the same"
    assert all(0 <= key < 2**63 for key in keys)
    assert derive_key("seed", 7, 0) == derive_key("seed", 7, 0)


def test_numbers_do_not_change_between_releases() -> None:
    """A seed promises the same text later: these values were computed by Python integers, not by torch."""
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def mix(x: int, counter: int) -> int:
        z = (x + (counter + 1) * golden) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    for key in (0, 1, derive_key("seed", 7, 0), 2**63 - 1):
        for counters in ((), (0,), (4, 100, 49151), (2**40,)):
            expected = mix(key, 0)
            for counter in counters:
                expected = mix(expected, counter)
            assert int(bits(torch.tensor(key), *counters)) & mask == expected
            assert float(uniform(torch.tensor(key), *counters)) == (expected >> 11) * 2.0**-53
    assert derive_key("seed", 7, 0) == 4277653140880986261


@pytest.mark.parametrize("purpose", Purpose)
def test_numbers_of_a_round_come_from_their_key_round_purpose_and_slot(
    purpose: Purpose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a kernel on a CPU that compiles them, by torch elsewhere: the same bits."""
    keys = torch.tensor([0, 2**63 - 1, *(derive_key(i) for i in range(4))])
    rounds = torch.tensor([0, 2**40, 1, 2, 3, 2**33])
    for slots in (0, 1, 7, 40):
        expected = uniform(keys.unsqueeze(-1), rounds.unsqueeze(-1), int(purpose), torch.arange(slots))
        assert torch.equal(round_uniform(keys, rounds, purpose, slots), expected)
        with monkeypatch.context() as patch:
            patch.setattr("dspark_core.randomness.have_kernels", lambda: False)
            assert torch.equal(round_uniform(keys, rounds, purpose, slots), expected)
