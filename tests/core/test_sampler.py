"""A round of a mixed batch: rows of every kind keep to themselves, draws are fresh, penalties see the block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark_core.adjustments import Penalties, RowSource
from dspark_core.distributions import distributions
from dspark_core.randomness import Purpose, derive_key, gumbel, round_uniform, uniform
from dspark_core.sampler import Round
from dspark_core.sampling import Filters, SamplingParams
from tests.core.slow import CPU, START, play, slow_penalties

VOCAB = 30


def table(seed: int, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "ratio": SamplingParams(),
    "coupled": SamplingParams(seed=3),
    "greedy, penalised": SamplingParams(temperature=0.0, presence_penalty=1.0, repetition_penalty=1.3),
    "ratio, filtered": SamplingParams(temperature=0.7, top_k=5, top_p=0.9),
    "coupled, filtered": SamplingParams(temperature=1.4, min_p=0.05, seed=4),
    "ratio, penalised": SamplingParams(frequency_penalty=0.5),
    "tiny temperature": SamplingParams(temperature=1e-5),
}


def test_requests_are_untouched_by_their_neighbours() -> None:
    """Cases B11, C4 and Q3: in one batch of every kind each request says what it says alone."""
    target, draft = table(1), table(1) + 0.7 * table(2)
    params = [*KINDS.values(), *KINDS.values()]
    keys = [derive_key("mixed", i) for i in range(len(params))]
    for draft_len in (0, 4):
        options: dict[str, Any] = {"num_tokens": 12, "draft_len": draft_len}
        together = play(target, draft, params, keys, **options)
        for row in range(len(params)):
            alone = play(target, draft, [params[row]], [keys[row]], **options)
            assert torch.equal(alone.tokens[0], together.tokens[row]), params[row]
        if draft_len:
            assert 0.1 < together.accepted / (together.rounds * draft_len) < 0.9


def test_rows_stay_aligned_when_lengths_differ() -> None:
    """Case Q4: requests with no, some and all drafts admitted beside each other."""
    target, draft = table(1), table(1) + 0.7 * table(2)
    sources = [RowSource(p, derive_key(i), 5, 40 + i, (START,), (7, 8)) for i, p in enumerate(KINDS.values())]
    lens = [3, 0, 2, 1, 3, 0, 2, 3]
    last = torch.arange(len(sources)) + 4

    def go(rows: list[int]) -> list[list[Any]]:
        this = Round([sources[i] for i in rows], CPU)
        previous, ids = last[rows], last.new_empty(len(rows), 0)
        for slot in range(3):
            previous = this(slot, draft[previous], ids)
            ids = torch.cat((ids, previous.unsqueeze(-1)), -1)
        shown = [[int(last[r]), *ids[i].tolist()][: lens[r] + 1] for i, r in enumerate(rows)]
        logits = target[torch.tensor([token for tokens in shown for token in tokens])]
        verified = this.verify(logits, ids, [lens[r] for r in rows])
        return [ids.tolist(), verified.num_accepted.tolist(), verified.next_ids.tolist()]

    together = go(list(range(len(sources))))
    assert len(set(together[1])) > 1
    for row in range(len(sources)):
        assert all(whole[row] == part[0] for whole, part in zip(together, go([row]), strict=True))
    assert all(accepted <= length for accepted, length in zip(together[1], lens, strict=True))


def test_greedy_equals_plain_greedy_whatever_the_draft() -> None:
    target, params = table(1), [SamplingParams(temperature=0.0)] * 6
    plain = play(target, target, params, [0] * 6, num_tokens=20, draft_len=0).tokens
    expected, token = [], START
    for _ in range(20):
        token = int(target[token].argmax())
        expected.append(token)
    assert plain.tolist() == [expected] * 6
    for draft in (target, -target, table(2), target + table(3)):
        for draft_len in (1, 2, 7):
            played = play(target, draft, params, [0] * 6, num_tokens=20, draft_len=draft_len)
            assert torch.equal(played.tokens, plain)
            if draft is target:
                assert played.accepted == played.rounds * draft_len, "an oracle is always right"


def chosen(source: RowSource, slots: int = 3) -> list[int]:
    """Draft tokens from a flat distribution: nothing but the random numbers decides."""
    this, ids = Round([source], CPU), torch.empty(1, 0, dtype=torch.int64)
    for slot in range(slots):
        ids = torch.cat((ids, this(slot, torch.zeros(1, 10_000), ids).unsqueeze(-1)), -1)
    return [int(i) for i in ids[0]]


def test_ratio_draws_are_fresh_in_every_round_and_slot() -> None:
    source = RowSource(SamplingParams(), derive_key("x"), round=4, position=17)
    first = chosen(source)
    assert chosen(source) == first
    assert chosen(replace(source, position=99)) == first, "the position plays no part"
    others = [chosen(replace(source, round=5)), chosen(replace(source, key=derive_key("y")))]
    assert len({*first, *others[0], *others[1]}) == 9


def test_a_draft_is_drawn_from_the_numbers_that_it_is_judged_by() -> None:
    """Case B2: also where its logits are of 16 bits, with values close to each other."""
    rows = 200
    logits = (1 + 0.01 * torch.randn(rows, VOCAB)).to(torch.bfloat16)
    this = Round([RowSource(SamplingParams(), derive_key(row), 3, 9) for row in range(rows)], CPU)
    ids = this(0, logits, torch.empty(rows, 0, dtype=torch.int64))
    (judged,) = this.drafts
    numbers = round_uniform(this.ratio_keys, this.ratio_rounds, Purpose.DRAFT, 1)[:, 0]
    expected = distributions(logits.float(), Filters.of([SamplingParams()] * rows, CPU))
    assert torch.equal(ids, expected.draw(numbers))
    assert torch.equal(ids, judged.draw(numbers))
    assert len(set(ids.tolist())) > VOCAB / 2


def test_coupled_noise_belongs_to_the_position() -> None:
    source = RowSource(SamplingParams(seed=1), derive_key("x"), round=4, position=17)
    first = chosen(source)
    assert chosen(replace(source, round=9)) == first, "the round plays no part"
    assert chosen(replace(source, position=18))[:2] == first[1:], "position 18 keeps its noise whichever slot it is"
    assert len({*first, *chosen(replace(source, key=derive_key("y")))}) == 6


def test_acceptance_and_residual_use_streams_of_their_own() -> None:
    """What verification draws is told by the key, the round and its purpose: not by what was drafted."""
    key, number = derive_key("x"), 4
    this = Round([RowSource(SamplingParams(), key, number, 17)], CPU)
    flat = torch.zeros(1, 1000)
    ids = this(0, flat, torch.empty(1, 0, dtype=torch.int64)).unsqueeze(-1)
    elsewhere = torch.full((2, 1000), 0.0)
    elsewhere[0, int(ids)] = -50  # the target never says the drafted token
    verified = this.verify(elsewhere, ids, [1])
    assert verified.num_accepted.tolist() == [0]
    u = uniform(torch.tensor(key), number, int(Purpose.RESIDUAL), 0)
    assert abs(int(verified.next_ids) - float(u) * 999) < 2, "the residual draw inverts its own number"
    assert int(verified.next_ids) != int(ids)


def test_coupled_tokens_are_the_arg_max_of_the_positions_noise() -> None:
    key, vocab = derive_key("seed", 3, 0), 50
    logits = torch.randn(3, vocab)
    source = RowSource(SamplingParams(seed=3, temperature=0.8), key, 0, position=12)
    this, ids = Round([source], CPU), torch.empty(1, 0, dtype=torch.int64)
    for slot in range(2):
        ids = torch.cat((ids, this(slot, logits[slot : slot + 1], ids).unsqueeze(-1)), -1)
    noise = gumbel(torch.tensor(key), int(Purpose.NOISE), torch.arange(12, 15).unsqueeze(-1), torch.arange(vocab))
    expected = (logits.double() / 0.8 + noise).argmax(-1).tolist()
    assert ids[0].tolist() == expected[:2]
    verified = this.verify(logits, ids, [2])
    assert (int(verified.num_accepted), int(verified.next_ids)) == (2, expected[2])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(presence_penalty=2.0),
        SamplingParams(presence_penalty=-1.5, frequency_penalty=0.3),
        SamplingParams(frequency_penalty=2.0),
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(repetition_penalty=0.6),
        SamplingParams(presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.2),
    ],
)
def test_penalties_equal_their_definition(params: SamplingParams) -> None:
    """Row j of a block sees prompt, output and the first j tokens of the block; tokens unseen stay as they are."""
    logits = torch.randn(4, VOCAB) * 3
    prompt, output, block = [4, 5, 5, 9], [5, 11, 11, 2], [11, 20, 20]
    penalties = Penalties(RowSource(params, 0, 0, 0, prompt, output), CPU)
    whole = penalties.apply(logits, torch.tensor(block))
    for row in range(4):
        seen = output + block[:row]
        expected = slow_penalties(logits[row].tolist(), params, prompt, seen)
        assert float((whole[row] - torch.tensor(expected)).abs().max()) < 1e-5
        alone = penalties.apply(logits[row : row + 1], torch.tensor(block[:row], dtype=torch.int64), first=row)
        assert torch.equal(alone[0], whole[row])
        untouched = sorted(set(range(VOCAB)) - {*prompt, *seen})
        assert torch.equal(whole[row, untouched], logits[row, untouched])


def test_penalties_ignore_prompt_ids_past_the_emitted_vocabulary() -> None:
    """A prompt may hold ids that get no logit, such as padding rows of the embedding."""
    params = SamplingParams(repetition_penalty=2.0)
    penalties = Penalties(RowSource(params, 0, 0, 0, [3, VOCAB, VOCAB + 7], []), CPU)
    found = penalties.apply(torch.ones(1, VOCAB), torch.empty(0, dtype=torch.int64))
    assert found[0].tolist() == [0.5 if token == 3 else 1.0 for token in range(VOCAB)]


def test_penalties_count_earlier_slots_of_the_block() -> None:
    """Case B8: a target that loops; greedy with a presence penalty, with an oracle and with a draft that loops too."""
    target = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 0.3
    target[:, 6] += 4.0
    params = SamplingParams(temperature=0.0, presence_penalty=1.2, frequency_penalty=0.9, repetition_penalty=1.1)
    expected: list[int] = []
    while len(expected) < 24:
        logits = target[expected[-1] if expected else START].tolist()
        scores = slow_penalties(logits, params, [START], expected)
        expected.append(scores.index(max(scores)))
    assert 1 < expected.count(6) < 8, "the penalty must end the loop, and not at once"
    for draft in (target, table(2), 10 * torch.eye(VOCAB)[6].expand(VOCAB, -1)):
        for draft_len in (0, 1, 5):
            played = play(target, draft, [params] * 2, [0, 1], num_tokens=24, draft_len=draft_len)
            assert played.tokens.tolist() == [expected] * 2
    oracle = play(target, target, [params], [0], num_tokens=24, draft_len=5)
    assert oracle.accepted == oracle.rounds * 5, "the draft is penalised alike, so an oracle stays one"


def test_penalties_leave_their_neighbours_and_their_input_alone() -> None:
    sources = [
        RowSource(SamplingParams(temperature=0.0, presence_penalty=2.0), 0, 0, 1, [START], [3]),
        RowSource(SamplingParams(temperature=0.0), 0, 0, 1, [START], [3]),
    ]
    logits = torch.zeros(2, VOCAB)
    logits[:, 3] = 1
    before = logits.clone()
    ids = Round(sources, CPU)(0, logits, torch.empty(2, 0, dtype=torch.int64))
    assert ids.tolist() == [0, 3]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("kind", ["greedy", "ratio", "coupled"])
def test_scores_that_are_not_finite_stay_in_their_row(kind: str) -> None:
    """Case S3: the engine ends such a request; here its neighbours must not notice, and nothing may raise."""
    sources = [RowSource(KINDS[kind], derive_key(i), 0, 1) for i in range(3)]
    logits = torch.randn(6, VOCAB)
    ids = torch.randint(0, VOCAB, (3, 1))
    drafts = torch.randn(3, VOCAB)

    def verify(scores: Tensor) -> tuple[list[int], list[int]]:
        this = Round(sources, CPU)
        this(0, drafts, torch.empty(3, 0, dtype=torch.int64))
        verified = this.verify(scores, ids, [1, 1, 1])
        return verified.num_accepted.tolist(), verified.next_ids.tolist()

    clean = verify(logits)
    for damage in (torch.nan, -torch.inf, torch.inf):
        broken = logits.clone()
        broken[2:4] = damage
        found = verify(broken)
        for row in (0, 2):
            assert (found[0][row], found[1][row]) == (clean[0][row], clean[1][row])
