"""Records come from the real engine, whole blocks only, and an interruption loses nothing."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from calibration.collect import RECORDS_FILE, collect, make_tasks, read_records
from calibration.settings import DEFAULT_PROMPTS, CalibrateConfig
from dspark_core.errors import CheckpointError
from dspark_core.sampling import REGIMES
from dspark_core.train.records import read_prompts
from server.engine import Engine
from server.policy import FixedLength
from server.request import Request
from tests.server.drafts import oracle
from tests.server.engines import MAX_MODEL_LEN, make_engine, tiny_draft

K = 4


def prompts_file(folder: Path, count: int = 3) -> Path:
    path = folder / "prompts.jsonl"
    lines = [{"domain": domain, "prompt": f"Say {i}."} for i in range(count) for domain in ("chat", "code")]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def config_of(folder: Path, **settings: Any) -> CalibrateConfig:
    base = {"prompts": str(prompts_file(folder)), "max_tokens": 12, "temperatures": [0.5, 1.0]}
    return CalibrateConfig.model_validate(base | settings)


def engine_of(**settings: Any) -> Engine:
    return make_engine(tiny_draft("vanilla", K, agrees=True), **settings)


def test_every_round_of_every_answer_is_recorded(tmp_path: Path) -> None:
    path, engine = tmp_path / RECORDS_FILE, engine_of()
    written = collect(config_of(tmp_path), engine, path, {})
    assert written == 6 * 5, "six prompts greedily, and under two rules at two temperatures each"
    assert not engine.observers
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(line["regime"], line["temperature"]) for line in lines} == {
        ("greedy", 0.0), ("ratio", 0.5), ("ratio", 1.0), ("coupled", 0.5), ("coupled", 1.0),
    }  # fmt: skip
    for line in lines:
        tokens = 1 + sum(found["accepted"] + 1 for found in line["rounds"])
        # The first token comes with the prompt; a last one alone is decoded plainly.
        assert tokens in (11, 12)
        for found in line["rounds"]:
            assert 0 <= found["accepted"] <= found["decided"] <= len(found["logits"]) <= K
    records = read_records(path, K)
    assert len(records) == sum(len(line["rounds"]) for line in lines)
    assert records.domains == ("chat", "code")
    assert set(records.regime.tolist()) == set(range(len(REGIMES)))


def test_records_end_where_the_text_ends(tmp_path: Path) -> None:
    """What was accepted beyond the end is neither accepted nor rejected: nobody knows."""
    greedy = make_engine()
    text = greedy.tokenizer.encode_chat([{"role": "user", "content": "Say 0."}])
    params = make_tasks(config_of(tmp_path), read_prompts(prompts_file(tmp_path)))
    plain = next(task for task in params if task.regime == "greedy").params(config_of(tmp_path))
    request = greedy.make_request(text, plain)
    greedy.add(request)
    while greedy.has_work:
        greedy.step()
    answer = list(request.output_ids)
    stop = next(answer[i] for i in (3, 2) if answer[i] not in answer[:i])  # inside the first block

    def continuation(_: Request) -> list[int]:
        return answer + [0] * MAX_MODEL_LEN

    drafter = oracle(K, continuation)
    engine = make_engine(drafter, eos=[stop])
    again = engine.make_request(text, plain)
    seen = []
    engine.observers.append(seen.append)
    engine.add(again)
    while engine.has_work:
        engine.step()
    last = seen[-1]
    assert again.finish_reason == "stop"
    assert last.decided == last.accepted < last.verified
    assert sum(int(found.accepted[0]) + 1 for found in seen[:-1]) + int(last.accepted[0]) + 1 == again.num_generated


def test_an_interruption_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    config = config_of(tmp_path)
    collect(config, engine_of(), whole, {})
    lines = whole.read_bytes().splitlines(keepends=True)
    settings = (tmp_path / "whole.jsonl.settings.json").read_bytes()
    part.with_name("part.jsonl.settings.json").write_bytes(settings)
    part.write_bytes(b"".join(lines[:10]) + lines[10][:20])  # killed while it wrote
    assert collect(config, engine_of(), part, {}) == len(lines) - 10
    ids = [json.loads(line)["id"] for line in part.read_bytes().splitlines()]
    assert len(ids) == len(set(ids)) == len(lines)
    deterministic = [json.loads(line) for line in lines if b'"ratio"' not in line]
    found = {record["id"]: record for record in map(json.loads, part.read_bytes().splitlines())}
    assert [outcomes(found[record["id"]]) for record in deterministic] == [outcomes(record) for record in deterministic]
    assert collect(config, engine_of(), part, {}) == 0


def test_wherever_the_answers_are_cut_off_they_are_a_fair_sample(tmp_path: Path) -> None:
    prompts = read_prompts(prompts_file(tmp_path, 50))
    everything = make_tasks(config_of(tmp_path, answers=10**6), prompts)
    assert len(set(everything)) == len(everything) == len(prompts) * 5
    for count in (6, 60, 240, 300):
        tasks = make_tasks(config_of(tmp_path, answers=count), prompts)
        assert tasks == everything[:count], "more answers later go on from here"
        shares = Counter((prompts[task.prompt].domain, task.regime) for task in tasks)
        assert set(shares.values()) == {count // 6}, "domains and rules alike"
        assert len({(task.prompt, task.regime) for task in tasks}) == count, "other prompts first"
    sampled = Counter(task.temperature for task in everything[:300] if task.regime == "ratio")
    assert min(sampled.values()) > 30, "temperatures by chance"
    assert make_tasks(config_of(tmp_path, answers=60, seed=1), prompts) != everything[:60]


def test_more_answers_are_added_to_the_same_records(tmp_path: Path) -> None:
    path = tmp_path / RECORDS_FILE
    assert collect(config_of(tmp_path, answers=7), engine_of(), path, {}) == 7
    assert collect(config_of(tmp_path, answers=12), engine_of(), path, {}) == 5
    assert collect(config_of(tmp_path, answers=9), engine_of(), path, {}) == 0


@pytest.mark.parametrize("change", [{"max_tokens": 9}, {"temperatures": [0.3]}, {"seed": 4}])
def test_other_settings_do_not_go_into_the_same_file(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / RECORDS_FILE
    collect(config_of(tmp_path), engine_of(), path, {})
    with pytest.raises(CheckpointError, match=f"was begun with {next(iter(change))}"):
        collect(config_of(tmp_path, **change), engine_of(), path, {})
    with pytest.raises(CheckpointError, match="was begun with origin"):
        collect(config_of(tmp_path), engine_of(), path, {"target": "another"})


def test_a_schedule_is_refused(tmp_path: Path) -> None:
    """Case V1: blocks that were cut short by how they looked are no fair sample."""
    engine = engine_of()
    engine.policy = FixedLength(2)
    with pytest.raises(CheckpointError, match="FixedLength is active; expected --verify full"):
        collect(config_of(tmp_path), engine, tmp_path / RECORDS_FILE, {})


def test_a_draft_without_confidence_is_refused(tmp_path: Path) -> None:
    engine = make_engine()
    with pytest.raises(CheckpointError, match="no confidence head"):
        collect(config_of(tmp_path), engine, tmp_path / RECORDS_FILE, {})


def test_a_domain_with_one_prompt_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(
        '{"domain": "chat", "prompt": "a"}\n{"domain": "chat", "prompt": "b"}\n{"domain": "x", "prompt": "c"}'
    )
    with pytest.raises(CheckpointError, match="one prompt of domain 'x'"):
        collect(config_of(tmp_path, prompts=str(path)), engine_of(), tmp_path / RECORDS_FILE, {})


def outcomes(record: dict[str, Any]) -> list[tuple[int, int]]:
    """Greedy and seeded answers are the same again; logits may differ in their last bits with what ran beside them."""
    return [(found["decided"], found["accepted"]) for found in record["rounds"]]


def record(**change: Any) -> str:
    base = {
        "id": "0",
        "prompt": 0,
        "domain": "chat",
        "regime": "ratio",
        "temperature": 1.0,
        "rounds": [{"logits": [0.5, 0.1], "decided": 1, "accepted": 0}],
    }
    return json.dumps(base | change)


def test_confidence_that_is_no_number_is_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Case V9."""
    path = tmp_path / RECORDS_FILE
    broken = [{"logits": [0.5, math.nan], "decided": 1, "accepted": 0}]
    path.write_text(record(rounds=broken))
    with pytest.raises(CheckpointError, match="no round that can be used"):
        read_records(path, K)
    path.write_text(record(rounds=broken) + "\n" + record())
    records = read_records(path, K)
    assert len(records) == 1
    assert records.known.tolist() == [[True, True, False, False]]
    assert "1 rounds without a number" in caplog.text


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"regime": "other"}, "regime 'other', expected greedy, ratio, coupled"),
        ({"rounds": [{"logits": [0.0] * 9, "decided": 1, "accepted": 0}]}, "9 slots in a round, expected at most 4"),
        ({"rounds": [{"logits": [0.0], "decided": 1}]}, "key 'accepted' is missing"),
        ({"rounds": [{"logits": [0.0], "decided": 0, "accepted": 1}]}, "accepted 1 of 0 decided"),
        ({"rounds": [3]}, "a round is an int"),
        ({"domain": 3}, "key 'domain' is 3"),
    ],
)
def test_records_that_are_not_ours_are_refused_by_line(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / RECORDS_FILE
    path.write_text(record() + "\n" + record(**change))
    with pytest.raises(CheckpointError, match=complaint) as error:
        read_records(path, K)
    assert "line 2" in str(error.value)


def test_the_prompts_that_come_with_it_cover_domains_and_are_not_those_of_the_benchmarks() -> None:
    ours = read_prompts(DEFAULT_PROMPTS)
    domains = [prompt.domain for prompt in ours]
    assert {domain: domains.count(domain) >= 20 for domain in set(domains)} == dict.fromkeys(
        ("chat", "math", "code"), True
    )
    texts = [" ".join(message["content"] for message in prompt.messages) for prompt in ours]
    assert len(set(texts)) == len(texts)
    measured = read_prompts(Path(__file__).parents[2] / "benchmarks" / "prompts.jsonl")
    assert not set(texts) & {prompt.messages[0]["content"] for prompt in measured}
