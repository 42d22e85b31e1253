"""What `eval` counts: against drafters of which every outcome is known, and through the whole command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dspark_core.errors import CheckpointError
from dspark_core.train.records import Prompt
from server.request import Request
from server.train import cli
from server.train.evaluate import (
    Acceptance,
    Answer,
    answer_prompts,
    evaluate,
    is_looping,
    mean_length,
    select,
    summarise,
    table,
)
from server.train.settings import EvalConfig
from tests.server.drafts import ScriptedDrafter
from tests.server.engines import make_engine, reference_greedy, tiny_target
from tests.tiny import tiny_draft_folder, tiny_target_folder

K, COUNT = 4, 24
QUESTION = [{"role": "user", "content": "why?"}]


def continuation(request: Request) -> list[int]:
    return reference_greedy(tuple(request.prompt_ids), COUNT)


def text_of(messages: list[dict[str, Any]]) -> list[int]:
    return reference_greedy(tuple(tiny_target().tokenizer.encode_chat(messages)), COUNT)


def asked(
    prompts: Sequence[Prompt], pattern: Sequence[int], max_tokens: int = COUNT, eos: Sequence[int] = ()
) -> list[Answer]:
    """Answers with a drafter whose n-th block has pattern[n] right slots, -1 for all."""
    engine = make_engine(ScriptedDrafter(K, continuation, pattern), eos=eos, max_num_seqs=3)
    return list(answer_prompts(engine, prompts, temperature=0.0, max_tokens=max_tokens, where="prompts.jsonl"))


def counted(answers: Sequence[Answer]) -> Acceptance:
    acceptance = Acceptance()
    for answer in answers:
        acceptance.add(answer.request, K)
    return acceptance


@pytest.mark.parametrize(
    ("pattern", "max_tokens", "rounds", "decided", "accepted"),
    [
        # One token comes with the prompt; a round of k accepted drafts brings k + 1.
        ([-1], 11, 2, [2, 2, 2, 2], [2, 2, 2, 2]),
        ([0], 5, 3, [3, 0, 0, 0], [0, 0, 0, 0]),
        ([2], 10, 3, [3, 3, 2, 0], [3, 3, 0, 0]),
        ([3, 0, -1], 11, 3, [3, 2, 2, 2], [2, 2, 2, 1]),
        # A block that max_tokens cuts is shorter: what was not proposed is not decided.
        ([-1], 8, 2, [2, 1, 1, 1], [2, 1, 1, 1]),
        ([3], 17, 4, [4, 4, 4, 3], [4, 4, 4, 0]),
        ([-1], 2, 0, [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_positions_are_counted_when_they_are_decided(
    pattern: list[int], max_tokens: int, rounds: int, decided: list[int], accepted: list[int]
) -> None:
    found = counted(asked([Prompt("all", QUESTION)], pattern, max_tokens))
    assert (found.rounds, found.decided, found.accepted) == (rounds, decided, accepted)
    assert (found.tokens, found.prompts) == (max_tokens, 1)
    assert found.acceptance_length == (1 + sum(accepted) / rounds if rounds else 1)
    assert found.by_position == [a / d if d else None for a, d in zip(accepted, decided, strict=True)]


@pytest.mark.parametrize(
    ("right", "end", "decided", "accepted"),
    [
        (-1, 3, [1, 1, 1, 0], [1, 1, 1, 0]),  # inside the accepted block: what lies behind is not decided
        (-1, 4, [1, 1, 1, 1], [1, 1, 1, 1]),  # with its last draft token
        (-1, 5, [1, 1, 1, 1], [1, 1, 1, 1]),  # with the bonus token
        (2, 2, [1, 1, 0, 0], [1, 1, 0, 0]),  # with the last token before a rejection, which nobody sees
        (2, 3, [1, 1, 1, 0], [1, 1, 0, 0]),  # with the token that stands for a rejected one
        (0, 0, [0, 0, 0, 0], [0, 0, 0, 0]),  # with the token that comes with the prompt
    ],
)
def test_an_end_of_text_inside_a_block(right: int, end: int, decided: list[int], accepted: list[int]) -> None:
    text = text_of(QUESTION)
    assert len(set(text[:6])) == 6, "or the text would end sooner"
    found = counted(asked([Prompt("all", QUESTION)], [right], eos=[text[end]]))
    assert (found.decided, found.accepted) == (decided, accepted)
    assert (found.rounds, found.tokens) == (min(end, 1), end + 1)


def test_counts_of_many_answers_add_up() -> None:
    prompts = [Prompt("all", [{"role": "user", "content": f"{n}?"}]) for n in range(5)]
    together = counted(asked(prompts, [3, 0, -1], 11))
    assert (together.rounds, together.prompts, together.tokens) == (15, 5, 55)
    assert (together.decided, together.accepted) == ([15, 10, 10, 10], [10, 10, 10, 5])


@pytest.mark.parametrize(
    ("ids", "looping"),
    [
        ([], False),
        ([7] * 23, False),  # 24 tokens at least, or every short list would loop
        ([7] * 24, True),
        ([5, 6] * 12, True),
        ([5, 6] * 11 + [5], False),
        (list(range(100, 108)) * 3, True),
        (list(range(100, 109)) * 3, True),
        (list(range(100, 109)) * 2 + list(range(100, 108)), False),  # not yet three times
        (list(range(100, 130)) * 2, False),
        (list(range(50)) + [5, 6, 7] * 8, True),  # begins well
        ([5, 6, 7] * 8 + [8], False),  # got out of it
        ([1, 5, 6, 2, 5, 6, 3, 5, 6, 4, 5, 6] * 2, False),  # a numbered list, twice
        (list(range(60)), False),
    ],
)
def test_an_answer_loops_when_its_end_repeats_often_and_long_enough(ids: list[int], looping: bool) -> None:
    assert is_looping(ids) is looping
    assert is_looping(tuple(ids)) is looping


def test_looping_answers_are_counted_apart_and_in_the_whole() -> None:
    prompts = [Prompt("b", [{"role": "user", "content": f"{n}?"}]) for n in range(3)] + [Prompt("a", QUESTION)]
    answers = asked(prompts, [2], 10)
    for answer in answers[:2]:  # what a request holds after such a text
        answer.request.tokens[len(answer.request.prompt_ids) :] = [7] * 24
    kinds = {domain: {a.looping for a in answers if a.domain == domain} for domain in ("a", "b")}
    found = summarise(answers, K)
    assert list(found) == ["a", "b"]
    for domain, row in found.items():
        own = [answer for answer in answers if answer.domain == domain]
        assert row.items() >= counted(own).as_json().items()
        for name, looping in (("looping", True), ("not_looping", False)):
            part = [answer for answer in own if answer.looping is looping]
            assert row.get(name) == (counted(part).as_json() if part else None)
    assert kinds["b"] | kinds["a"] == {True, False}


def test_domains_weigh_the_same_in_the_mean() -> None:
    assert mean_length({"a": {"acceptance_length": 2.0}, "b": {"acceptance_length": 5.0}}) == 3.5


def test_the_limit_is_by_domain() -> None:
    prompts = [Prompt(domain, [{"content": n}]) for n, domain in enumerate("abacbab")]
    assert [p.messages[0]["content"] for p in select(prompts, 2)] == [0, 1, 2, 3, 4]
    assert [p.messages[0]["content"] for p in select(prompts, 1)] == [0, 1, 3]
    assert select(prompts, None) == prompts


def test_the_table_shows_what_was_never_decided_as_a_dash() -> None:
    found = summarise(asked([Prompt("maths", QUESTION)], [0], 5), K)
    lines = table(found, 0.0).splitlines()
    assert lines[1].split() == ["maths", "1", "5", "3", "1.000", "0.00", "-", "-", "-"]
    assert lines[-1].split() == ["mean", "of", "domains", "1.000"]


@pytest.mark.parametrize(
    "prompt", [Prompt("a", [{"role": "robot"}]), Prompt("a", [QUESTION[0] | {"content": "x" * 300}])]
)
def test_a_prompt_that_cannot_be_used_is_named(prompt: Prompt) -> None:
    with pytest.raises(CheckpointError, match=r"prompts\.jsonl: a prompt cannot be used: "):
        asked([Prompt("a", QUESTION), prompt], [0])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    tiny_draft_folder(folder, tiny_target_folder(folder), draft_len=K, agrees=True)
    lines = [{"domain": "ab"[n % 2], "prompt": f"question {n}"} for n in range(5)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def config(models: Path, **changes: Any) -> EvalConfig:
    given = {"ckpt": models / "draft", "target": models / "target", "prompts": models / "prompts.jsonl"}
    return EvalConfig(**{name: str(path) for name, path in given.items()} | {"max_tokens": 20} | changes)


def test_the_file_has_one_entry_a_domain(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluate(config(models, json=str(tmp_path / "x.json")))
    assert json.loads((tmp_path / "x.json").read_text()) == found
    assert list(found) == ["a", "b"]
    assert [row["prompts"] for row in found.values()] == [3, 2]
    for row in found.values():
        shares, decided = row["acceptance_by_position"], row["decided_by_position"]
        assert len(shares) == len(decided) == K
        accepted = [round(share * count) if count else 0 for share, count in zip(shares, decided, strict=True)]
        assert decided == sorted(decided, reverse=True)
        assert all(after <= before for before, after in zip(accepted, decided[1:], strict=False))
        assert row["acceptance_length"] == pytest.approx(1 + sum(accepted) / row["rounds"])
        assert 1.2 < row["acceptance_length"] < 1 + K, "this draft is right about every second time"
        assert row["rounds"] < row["tokens"] <= 20 * row["prompts"]
    assert f"{mean_length(found):.3f}" in capsys.readouterr().out.splitlines()[-1]


def test_batches_seeds_and_limits(models: Path) -> None:
    greedy = evaluate(config(models))
    assert evaluate(config(models, max_num_seqs=1, seed=4)) == greedy, "neither has a part in greedy answers"
    limited = evaluate(config(models, limit=1))
    assert [row["prompts"] for row in limited.values()] == [1, 1]
    drawn = [evaluate(config(models, temperature=1.0, seed=seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    shorter = evaluate(config(models, draft_len=2))
    assert [len(row["acceptance_by_position"]) for row in shorter.values()] == [2, 2]


def test_figures_are_not_lost_to_a_folder_that_is_missing(models: Path, tmp_path: Path) -> None:
    path, given = tmp_path / "new" / "x.json", ["--ckpt", str(models / "draft"), "--target", str(models / "target")]
    given += ["--prompts", str(models / "prompts.jsonl"), "--limit", "1"]
    assert cli.main(["eval", *given, "--json", str(path)]) == 0
    assert list(json.loads(path.read_text())) == ["a", "b"]


def test_a_folder_that_cannot_be_made_is_known_before_the_measurement(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("server.train.evaluate.load_engine", None)
    prompts = str(models / "prompts.jsonl")
    assert cli.main(["eval", "--prompts", prompts, "--json", f"{prompts}/x.json"]) == 1
    assert capsys.readouterr() == ("", f"dspark-train: error: {prompts}: File exists\n")
