"""Draft lengths chosen from earlier rounds: they change the speed and never the text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dspark_core.arrays import Floats
from dspark_core.sampling import SamplingParams
from dspark_core.step_cost import CostCurves, StepCost
from server.auto_policy import AutoPolicy
from server.config import ServerConfig
from server.loader import load_engine
from server.policy import FixedLength, LengthPolicy, Rounds
from server.request import Request, RequestParams
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
    assert good.last.speculation.accepted > 30
    assert bad.last.speculation.rounds < 20, "of some 45"


def some_request(params: RequestParams | None = None) -> Request:
    return Request([1], params or RequestParams(), 1000, frozenset(), 0, None)  # type: ignore[arg-type]


def choose(policy: AutoPolicy, requests: Sequence[Request], limits: Sequence[int]) -> list[int]:
    return policy.plan(requests, limits, 0)


def tell(policy: AutoPolicy, request: Request, *, drafted: int, accepted: int, rounds: int = 1) -> None:
    for _ in range(rounds):
        policy.observe(one_round(request, None, drafted=drafted, verified=drafted, accepted=accepted))


def test_limits_hold_and_plain_requests_stay_plain() -> None:
    policy = AutoPolicy(COST)
    requests = [Request([1], RequestParams(), 1000, frozenset(), 0, None) for _ in range(3)]  # type: ignore[arg-type]
    tell(policy, requests[0], drafted=4, accepted=4, rounds=40)
    assert choose(policy, requests, [2, 0, 0]) == [2, 0, 0]
    assert choose(policy, requests[1:], [0, 0]) == [0, 0]


@pytest.mark.parametrize("chooses", [True, False])
def test_who_does_not_choose_by_confidence_gets_it_afterwards(chooses: bool) -> None:
    """It is not waited for before the target's pass, where nobody needs it there."""
    seen, told = list[Floats | None](), list[Rounds]()

    def admit(slots: Sequence[int], logits: Floats | None) -> list[int]:
        seen.append(logits)
        return list(slots)

    engine = make_engine(tiny_draft("vanilla", 4))
    engine.policy = Lengths(admit=admit)
    engine.policy.admits_by_confidence = chooses
    engine.observers.append(told.append)
    run(engine, [(make_prompt(9), RequestParams(GREEDY, max_tokens=12))])
    assert len(seen) == len(told) > 2
    assert all((logits is not None) == chooses for logits in seen)
    assert all(rounds.logits is not None and np.isfinite(rounds.logits).all() for rounds in told)


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
