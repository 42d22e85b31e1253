"""Draft lengths chosen from earlier rounds: they change the speed and never the text."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from dspark_core.checkpoint.calibration import Calibration
from dspark_core.sampling import SamplingParams
from dspark_core.step_cost import CostCurves, StepCost
from server.auto_policy import WATCHED, AutoPolicy
from server.config import ServerConfig
from server.loader import load_engine
from server.policy import FixedLength, LengthPolicy
from server.request import Request, RequestParams
from server.trials import EXPLORE_EVERY, EXPLORE_RARELY, EXPLORE_ROUNDS, EXPLORE_SLOTS, EXPLORE_SOON, PLAIN_EVERY, REST
from tests.server.drafts import ScriptedDrafter, adversary, oracle
from tests.server.engines import GREEDY, make_engine, make_prompt, run, tiny_draft
from tests.server.policies import Lengths, Timeless, one_round
from tests.tiny import tiny_draft_folder, tiny_target_folder

COUNT = 40
SEEDED = SamplingParams(temperature=0.8, seed=5)
# A whole block costs what two plain steps cost, so that it pays from two accepted drafts on.
COST = StepCost(CostCurves([1, 5, 40], [1.0, 1.4, 4.9], [1, 8], [0.3, 0.5], [0.6, 1.0], draft_len=4))


@cache
def plain(sampling: SamplingParams, size: int, count: int = COUNT) -> list[int]:
    engine = make_engine()
    return run(engine, [(make_prompt(size), RequestParams(sampling, max_tokens=count))])[0].ids


def continuation(request: Request) -> list[int]:
    return plain(request.params.sampling, len(request.prompt_ids), request.max_tokens)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_any_lengths_give_the_same_text(sampling: SamplingParams, kind: str) -> None:
    """Case V7."""
    source = random.Random(1)

    def anything(requests: Sequence[Request], limits: Sequence[int]) -> list[int]:
        return [source.randint(0, limit) for limit in limits]

    engine = make_engine(tiny_draft(kind, 4, agrees=kind == "vanilla"))
    engine.policy = Lengths(anything)
    jobs = [(make_prompt(size), RequestParams(sampling, max_tokens=COUNT)) for size in (1, 17, 64, 130)]
    for result in run(engine, jobs, arrivals=[0, 2, 3, 5]):
        assert result.ids == continuation(result.request)
        assert 0 < result.last.speculation.rounds < COUNT


def test_a_draft_that_is_right_is_used_and_one_that_is_wrong_is_left() -> None:
    rounds = {}
    for kind in (oracle, adversary):
        engine = make_engine(kind(4, continuation))
        engine.policy = Timeless(COST)
        (result,) = run(engine, [(make_prompt(17), RequestParams(GREEDY, max_tokens=60))])
        assert result.ids == plain(GREEDY, 17, 60)
        rounds[kind] = result.last.speculation
    assert rounds[oracle].accepted == rounds[oracle].drafted
    assert rounds[oracle].rounds < 20, "whole blocks from early on"
    assert rounds[adversary].rounds < 10, "soon given up"


def test_requests_are_judged_one_by_one() -> None:
    """One that is easily drafted beside one that is not."""
    easy = make_prompt(17)

    def sometimes(request: Request) -> list[int]:
        right = continuation(request)
        return right if request.prompt_ids == easy else [(token + 1) % 200 for token in right]

    engine = make_engine(ScriptedDrafter(4, sometimes, [-1]))
    engine.policy = Timeless(COST)
    params = RequestParams(GREEDY, max_tokens=60)
    good, bad = run(engine, [(easy, params), (make_prompt(30), params)])
    assert good.last.speculation.accepted > 40
    assert bad.last.speculation.rounds < 20, "of some 45"


def some_request(params: RequestParams | None = None) -> Request:
    return Request([1], params or RequestParams(), 1000, frozenset(), 0, None)  # type: ignore[arg-type]


def choose(policy: AutoPolicy, requests: Sequence[Request], limits: Sequence[int]) -> list[int]:
    return policy.plan(requests, limits, 0)


def tell(policy: AutoPolicy, request: Request, *, drafted: int, accepted: int, rounds: int = 1) -> None:
    for _ in range(rounds):
        policy.observe(one_round(request, None, drafted=drafted, verified=drafted, accepted=accepted))


def test_who_gave_up_tries_again_and_recovers() -> None:
    policy, request = AutoPolicy(COST), some_request()
    tell(policy, request, drafted=4, accepted=0, rounds=60)
    lens = [choose(policy, [request], [4])[0] for _ in range(8 * EXPLORE_EVERY)]
    assert sorted(set(lens)) == [0, EXPLORE_SLOTS]
    began = [i for i in range(len(lens)) if lens[i] and not (i and lens[i - 1])]
    assert began == pytest.approx([EXPLORE_EVERY, 3 * EXPLORE_EVERY, 7 * EXPLORE_EVERY], abs=4 * REST), (
        "ever more rarely"
    )
    assert lens.count(EXPLORE_SLOTS) == 3 * EXPLORE_ROUNDS
    tell(policy, request, drafted=4, accepted=4, rounds=60)
    assert [choose(policy, [request], [4])[0] for _ in range(REST + 1)][-1] == 4


def test_short_requests_learn_for_those_after_them() -> None:
    """Each is over long before it alone would try again."""
    policy, drafted = AutoPolicy(COST), []
    for number in range(150):
        request = some_request()
        right = number >= 10  # the first ones' drafts are wrong, all others' right
        for _ in range(20):
            (length,) = choose(policy, [request], [4])
            drafted.append(length)
            if length:
                tell(policy, request, drafted=length, accepted=length if right else 0)
    assert max(drafted[120:180]) == 0, "given up"
    assert sorted(set(drafted[-200:])) in ([4], [0, 4]), "and found again"
    assert drafted[-200:].count(0) <= 200 // PLAIN_EVERY + 1, "but for a plain step now and then"


def test_one_of_many_tries_at_a_time() -> None:
    policy, requests = AutoPolicy(COST), [some_request() for _ in range(5)]
    for request in requests:
        tell(policy, request, drafted=4, accepted=0, rounds=30)
    lens = [choose(policy, requests, [4] * 5) for _ in range(15 * EXPLORE_EVERY + 2 * EXPLORE_ROUNDS + 10 * REST)]
    tried = [sum(map(bool, step)) for step in lens]
    assert max(tried) == 1
    assert [sum(map(bool, column)) for column in zip(*lens, strict=True)] == [EXPLORE_ROUNDS] * 5, "each in turn"


def test_trying_gets_no_rarer_than_it_must() -> None:
    policy, request = AutoPolicy(COST), some_request()
    tell(policy, request, drafted=4, accepted=0, rounds=60)
    lens = [choose(policy, [request], [4])[0] for _ in range(10 * EXPLORE_RARELY)]
    assert EXPLORE_ROUNDS <= sum(map(bool, lens[-EXPLORE_RARELY - 2 * REST :])) <= 2 * EXPLORE_ROUNDS
    (length,) = {length for length in lens if length}
    assert length == EXPLORE_SLOTS
    tell(policy, request, drafted=4, accepted=4, rounds=60)
    lens = [choose(policy, [request], [4])[0] for _ in range(REST + 1)]
    assert lens[-1] == 4
    tell(policy, request, drafted=4, accepted=0, rounds=200)
    lens = [choose(policy, [request], [4])[0] for _ in range(EXPLORE_EVERY + 2 * REST)]
    assert any(lens), "soon again, after drafting has paid"


def test_a_draft_that_may_pay_is_tried_soon() -> None:
    """A slot costs 0.4 of a plain step here, so that a draft known to be right in 0.37 of the rounds nearly pays."""
    for known, first in ((0.37, EXPLORE_SOON), (0.05, EXPLORE_EVERY)):
        policy, request = AutoPolicy(COST, Calibration({}, {"ratio": (known,) * 4})), some_request()
        lens = [choose(policy, [request], [4])[0] for _ in range(8 * EXPLORE_EVERY)]
        began = [i for i in range(len(lens)) if lens[i] and not (i and lens[i - 1])]
        assert began[0] == pytest.approx(first, abs=2 * REST)
        assert began[1] == pytest.approx(3 * first, abs=4 * REST), "ever more rarely"
    policy = AutoPolicy(COST, Calibration({}, {"ratio": (0.37,) * 4}))
    for _ in range(60):
        tell(policy, some_request(), drafted=4, accepted=0)
    lens = [choose(policy, [request], [4])[0] for _ in range(EXPLORE_EVERY + 2 * REST)]
    assert lens.index(EXPLORE_SLOTS) == pytest.approx(EXPLORE_EVERY, abs=2 * REST), "no hope is left"


def test_where_there_is_hope_all_try_together() -> None:
    policy = AutoPolicy(COST, Calibration({}, {"ratio": (0.45,) * 4}))
    requests = [some_request() for _ in range(3)]
    lens = [choose(policy, requests, [4] * 3) for _ in range(EXPLORE_SOON + 2 * REST)]
    assert [step for step in lens if any(step)] == [[EXPLORE_SLOTS] * 3] * EXPLORE_ROUNDS


def hopeless() -> AutoPolicy:
    """Even a sure draft of four slots would cost more than it brings."""
    cost = StepCost(CostCurves([1, 5, 40], [1.0, 9.0, 79.0], [1, 8], [2.0, 9.0], [4.0, 18.0], draft_len=4))
    return AutoPolicy(cost, Calibration({}, {"ratio": (0.4,) * 4}))


def test_where_no_draft_can_pay_requests_are_plain_but_for_some(caplog: pytest.LogCaptureFixture) -> None:
    policy = hopeless()
    with caplog.at_level(logging.INFO):
        able = [policy.may_draft(some_request()) for _ in range(4 * WATCHED)]
    assert able == [number % WATCHED == 0 for number in range(1, 4 * WATCHED + 1)]
    assert caplog.text.count("no draft would pay here") == 1, "said once"


def test_where_a_draft_pays_for_one_alone_every_request_may(caplog: pytest.LogCaptureFixture) -> None:
    """Though it does not at the present load, or by what is known: loads fall, and estimates err."""
    policy, requests = AutoPolicy(COST, Calibration({}, {"ratio": (0.3,) * 4})), [some_request() for _ in range(20)]
    assert choose(policy, requests, [4] * 20) == [0] * 20
    assert all(policy.may_draft(some_request()) for _ in range(2 * WATCHED))
    for _ in range(100):
        tell(policy, some_request(), drafted=4, accepted=0)
    assert not policy.may_draft(some_request()), "once it is known to be bad"
    for _ in range(40):
        tell(policy, some_request(), drafted=4, accepted=4)
    assert policy.may_draft(some_request()), "and again when it is not any more"
    assert "no draft would pay" not in caplog.text


def test_requests_that_cannot_draft_cost_what_plain_ones_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(oracle(4, continuation))
    engine.policy = hopeless()
    assert engine.drafter is not None
    absorb, written = engine.drafter.absorb, list[int]()

    def noting(features: Tensor, positions: Tensor, slots: Tensor) -> None:
        written.append(len(features))
        absorb(features, positions, slots)

    monkeypatch.setattr(engine.drafter, "absorb", noting)
    params = RequestParams(GREEDY, max_tokens=COUNT)
    for _ in range(WATCHED - 1):
        (result,) = run(engine, [(make_prompt(9), params)])
        assert result.ids == plain(GREEDY, 9)
    assert not written, "nothing was kept for the draft"
    results = run(engine, [(make_prompt(9), params), (make_prompt(9), replace(params, whole_blocks=True))])
    assert [result.ids for result in results] == [plain(GREEDY, 9)] * 2
    assert written, "but for the one that tries, and for one whose client wants blocks"
    assert results[1].last.speculation.accepted > 0


def test_whether_a_request_may_draft_is_decided_once() -> None:
    engine = make_engine(oracle(4, continuation))
    request = engine.make_request(make_prompt(9), RequestParams(GREEDY, max_tokens=COUNT))
    engine.policy = hopeless()
    engine.add(request)
    engine.step()
    engine.policy = LengthPolicy()
    while engine.has_work:
        engine.step()
    assert request.output_ids == plain(GREEDY, 9)
    assert request.speculation.rounds == 0, "a context that was begun in the middle would have a hole"


def test_limits_hold_and_plain_requests_stay_plain() -> None:
    policy = AutoPolicy(COST)
    requests = [Request([1], RequestParams(), 1000, frozenset(), 0, None) for _ in range(3)]  # type: ignore[arg-type]
    tell(policy, requests[0], drafted=4, accepted=4, rounds=40)
    assert choose(policy, requests, [2, 0, 0]) == [2, 0, 0]
    assert choose(policy, requests[1:], [0, 0]) == [0, 0]


@pytest.mark.parametrize("verify", ["auto", "full"])
def test_the_server_measures_and_says_what_it_does(verify: str, tmp_path: Path) -> None:
    target = tiny_target_folder(tmp_path)
    draft = tiny_draft_folder(tmp_path, target, "vanilla", 4)
    settings = {"ckpt": str(draft), "target": str(target), "max_model_len": 128, "kv_memory_fraction": 0.01}
    engine = load_engine(ServerConfig.model_validate(settings | {"verify": verify}))
    assert isinstance(engine.policy, AutoPolicy) == (verify == "auto")
    assert engine.info["verification"] == {"auto": "as far as pays, by confidence", "full": "whole blocks"}[verify]
    (result,) = run(engine, [(make_prompt(9), RequestParams(GREEDY, max_tokens=30))])
    assert len(result.ids) == 30
    if verify == "full":
        assert result.last.speculation.drafted > 20


@pytest.mark.parametrize(("max_model_len", "max_num_seqs"), [(2, 1), (2, 16), (4, 3), (32, 1), (64, 1), (100, 16)])
def test_small_servers_are_measured_inside_their_memory(max_model_len: int, max_num_seqs: int, tmp_path: Path) -> None:
    target = tiny_target_folder(tmp_path)
    draft = tiny_draft_folder(tmp_path, target, "vanilla", 4)
    settings = {"ckpt": str(draft), "target": str(target), "kv_memory_fraction": 0.01, "page_size": 16}
    limits = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
    engine = load_engine(ServerConfig.model_validate(settings | limits))
    assert isinstance(engine.policy, AutoPolicy)
    (result,) = run(engine, [([5], RequestParams(GREEDY))])
    assert len(result.ids) == max_model_len - 1


def test_a_server_with_a_seed_gives_the_same_texts_whatever_steps_cost(tmp_path: Path) -> None:
    target = tiny_target_folder(tmp_path)
    draft = tiny_draft_folder(tmp_path, target, "vanilla", 4)
    settings = {"ckpt": str(draft), "target": str(target), "max_model_len": 128, "kv_memory_fraction": 0.01, "seed": 3}
    texts = []
    for _ in range(2):
        engine = load_engine(ServerConfig.model_validate(settings))
        assert type(engine.policy) is LengthPolicy
        assert "--seed" in engine.info["verification"]
        (result,) = run(engine, [(make_prompt(9), RequestParams(SamplingParams(), max_tokens=40))])
        texts.append(result.ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("policy", [AutoPolicy(COST), FixedLength(0), FixedLength(2)], ids=["auto", "off", "2"])
def test_a_client_may_ask_for_whole_blocks(policy: LengthPolicy) -> None:
    """Whatever the policy thinks of drafting; others in the batch are left to it."""
    engine = make_engine(adversary(4, continuation))
    engine.policy = policy
    params = RequestParams(GREEDY, max_tokens=COUNT)
    for _ in range(3):  # until nobody drafts by itself
        run(engine, [(make_prompt(9), params)])
    whole = replace(params, whole_blocks=True)
    asked, other = run(engine, [(make_prompt(9), whole), (make_prompt(12), params)])
    assert [asked.ids, other.ids] == [plain(GREEDY, 9), plain(GREEDY, 12)]
    spent = asked.last.speculation
    assert spent.rounds == COUNT - 1 - 1  # the first token comes from the prompt, the last has nothing to draft
    assert spent.verified == spent.drafted == 4 * (COUNT - 5) + 3 + 2 + 1
    assert other.last.speculation.drafted < spent.drafted
