"""Recipes compared: what an arm changes, intervals over prompts, and one tiny comparison from end to end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from dspark_core.errors import CheckpointError
from dspark_core.settings import UsageError, build
from dspark_core.train.config import FitConfig
from server.request import RequestParams
from server.train.compare import RESAMPLES, arm_settings, bootstrap, compare, interval, markdown, pooled_acceptance
from server.train.evaluate import Answer, mean_length, summarise
from server.train.settings import ARMS, DEFAULT_ARMS, CompareConfig
from tests.server.engines import GREEDY, make_engine, make_prompt
from tests.tiny import tiny_target_folder

K = 4
FILES = {"compare.json", "compare.md", "compare.png"}


def answers(accepted: Sequence[Sequence[int]], domain: str = "all", first: int = 0) -> list[Answer]:
    """One answer a prompt, with these accepted drafts in its rounds."""
    engine, found = make_engine(), []
    for number, rounds in enumerate(accepted):
        request = engine.make_request(make_prompt(5, seed=first + number), RequestParams(GREEDY, max_tokens=9))
        for count in rounds:
            request.count_round(drafted=K, verified=K, accepted=count, decided=min(count + 1, K))
        found.append(Answer(domain, request))
    return found


def random_rounds(count: int, seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, K, size=6).tolist() for _ in range(count)]


def test_an_interval_contains_the_value_and_shrinks_with_more_prompts() -> None:
    widths = []
    for count in (10, 160):
        found = answers(random_rounds(count, seed=1))
        low, high = interval(bootstrap(found, seed=0))
        assert low < mean_length(summarise(found, K)) < high
        widths.append(high - low)
    # Sixteen times the prompts: a quarter of the width, up to chance.
    assert 2 < widths[0] / widths[1] < 8


def test_an_interval_is_as_wide_as_the_spread_of_prompts_makes_it() -> None:
    """100 prompts of one round each: the mean's deviation is that of a round divided by 10."""
    rounds = random_rounds(100, seed=2)
    found = bootstrap(answers([r[:1] for r in rounds]), seed=0)
    assert len(found) == RESAMPLES
    deviation = np.std([r[0] for r in rounds]) / 10
    assert found.std() == pytest.approx(deviation, rel=0.1)  # of 2000 samples: known to some 2 %


def test_identical_arms_differ_by_exactly_nothing() -> None:
    """Whatever order their answers were ready in: the same prompts are drawn for both."""
    found = [*answers(random_rounds(12, seed=3), "a"), *answers(random_rounds(7, seed=4), "b", first=50)]
    mixed = [found[i] for i in np.random.default_rng(0).permutation(len(found))]
    assert not np.any(bootstrap(found, seed=0) - bootstrap(mixed, seed=0))


def test_differences_are_paired_by_prompt() -> None:
    """An arm that is better by one token in every round is so in every sample, however much the prompts differ."""
    rounds = random_rounds(12, seed=5)
    base, better = bootstrap(answers(rounds), seed=0), bootstrap(answers([[c + 1 for c in r] for r in rounds]), seed=0)
    assert np.allclose(better - base, 1, rtol=0, atol=1e-12)
    assert base.std() > 0.05, "of arms drawn apart the differences would spread"


def test_prompts_are_drawn_within_their_domain() -> None:
    """Domains that are constant in themselves leave nothing to chance, and weigh the same."""
    found = [*answers([[3, 3]] * 5, "a"), *answers([[0, 0]] * 2, "b", first=50)]
    assert np.array_equal(bootstrap(found, seed=0), np.full(RESAMPLES, (4 + 1) / 2))


def test_an_arm_without_rounds_has_a_length_of_one() -> None:
    assert np.array_equal(bootstrap(answers([[], []]), seed=0), np.ones(RESAMPLES))


def test_positions_are_pooled_by_how_often_they_were_decided() -> None:
    domains = {
        "a": {"decided_by_position": [4, 2, 0], "acceptance_by_position": [0.5, 0.0, None]},
        "b": {"decided_by_position": [12, 6, 0], "acceptance_by_position": [0.75, 0.5, None]},
    }
    first, second, never = pooled_acceptance(domains)
    assert (first, second) == (11 / 16, 3 / 8)
    assert isnan(never)


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_changes_only_what_it_says(arm: str) -> None:
    given = {"lr": 3e-4, "ce_weight": 0.5, "loss_decay": 2.0, "markov_rank": 9, "seed": 7, "max_steps": 5}
    config = CompareConfig(data=("d",), prompts="p", output="out", limit=3, max_tokens=5, **given)
    found = arm_settings(config, arm)
    assert type(found) is FitConfig
    expected = {name: getattr(config, name) for name in FitConfig.model_fields} | ARMS["paper"]
    assert found.model_dump() == expected | ARMS[arm] | {"output": f"out/{arm}"}


def test_arms_differ_from_the_paper_s_losses_whatever_the_file_says() -> None:
    """A preset with a decay of 4 would otherwise make the same run of "paper" and "decay_4"."""
    config = CompareConfig(data=("d",), prompts="p", output="out", loss_decay=4.0, ce_weight=0.7)
    paper, decay, dflash = (arm_settings(config, arm) for arm in ("paper", "decay_4", "dflash"))
    assert (paper.ce_weight, paper.tv_weight, paper.confidence_weight, paper.decay) == (0.1, 0.9, 1.0, 7)
    assert (decay.ce_weight, decay.decay) == (0.1, 4.0)
    assert (dflash.ce_weight, dflash.decay) == (0.1, 7)


def test_arms_differ_from_each_other() -> None:
    config = CompareConfig(data=("d",), prompts="p", output="out")
    found = {arm_settings(config, arm).model_copy(update={"output": ""}).model_dump_json() for arm in ARMS}
    assert len(found) == len(ARMS)
    assert set(DEFAULT_ARMS) <= ARMS.keys()


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CheckpointError, match="compare runs in one process, found WORLD_SIZE above 1"):
        compare(CompareConfig(data=("d",), prompts="p", output="out"))


def test_an_unknown_arm_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^--arms: found 'paprika', expected some of paper, "):
        build(CompareConfig, {"data": "d", "prompts": "p", "output": "o", "arms": "paper,paprika"})


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> CompareConfig:
    folder = tmp_path_factory.mktemp("compare")
    records = [
        {"id": f"p{n}-0", "prompt_ids": make_prompt(4, seed=n), "response_ids": make_prompt(20, seed=100 + n)}
        for n in range(8)
    ]
    return CompareConfig(
        target=str(tiny_target_folder(folder)),
        data=(write_lines(folder / "data.jsonl", records),),
        prompts=write_lines(folder / "prompts.jsonl", [{"domain": "ab"[n % 2], "prompt": f"{n}?"} for n in range(6)]),
        output=str(folder / "out"),
        arms=("paper", "cross_entropy"),
        draft_len=K,
        num_layers=1,
        markov_rank=4,
        num_anchors=4,
        max_length=64,
        max_steps=2,
        holdout=0.4,
        max_tokens=12,
        limit=2,
        device="cpu",
    )


@pytest.fixture(scope="module")
def result(config: CompareConfig) -> dict[str, Any]:
    return compare(config)


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


def test_files_are_written(config: CompareConfig, result: dict[str, Any]) -> None:
    output = Path(config.output)
    assert {path.name for path in output.iterdir() if path.suffix != ".lock"} == FILES | set(config.arms)
    assert json.loads((output / "compare.json").read_text(), parse_constant=refuse) == result
    assert (output / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert (output / "compare.md").read_text() == markdown(result)


def test_the_page_has_a_table_of_arms_and_one_of_positions(result: dict[str, Any]) -> None:
    tables = [
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines()]
        for part in markdown(result).split("\n\n")
        if part.startswith("|")
    ]
    (arms, positions), names = tables, ["paper", "cross_entropy"]
    assert [row[0] for row in arms] == ["arm", "---", *names]
    assert [row[0] for row in positions[2:]] == [f"{name}, T={t}" for t in "01" for name in names]
    assert all(len(row) == len(table[0]) for table in tables for row in table)
    assert "against paper, T=1" in arms[0]
    assert positions[0][1:] == [str(k + 1) for k in range(K)]
    shares = pooled_acceptance(result["arms"]["cross_entropy"]["temperatures"]["1"]["domains"])
    assert positions[-1][1:] == ["-" if isnan(share) else f"{share:.2f}" for share in shares]


def test_every_arm_has_its_figures_at_every_temperature(result: dict[str, Any]) -> None:
    assert result["settings"]["max_steps"] == 2
    assert {arm: found["changes"] for arm, found in result["arms"].items()} == {
        arm: ARMS[arm] for arm in ("paper", "cross_entropy")
    }
    for arm, found in result["arms"].items():
        assert found["validation"]["step"] == 2
        assert list(found["temperatures"]) == ["0", "1"]
        for row in found["temperatures"].values():
            assert [domain["prompts"] for domain in row["domains"].values()] == [2, 2], "the limit"
            low, high = row["interval"]
            assert 1 <= low <= row["acceptance_length"] <= high <= 1 + K
            low, high = row["difference_interval"]
            assert low <= row["difference"] <= high
            assert arm != "paper" or (low, high, row["difference"]) == (0, 0, 0)


def test_arms_start_from_the_same_settings(config: CompareConfig, result: dict[str, Any]) -> None:
    paper, entropy = (json.loads((Path(config.output) / arm / "fit.json").read_text()) for arm in result["arms"])
    different = {name for name in paper if paper[name] != entropy[name]}
    assert different == {"output", "ce_weight", "tv_weight", "confidence_weight"}


def test_a_second_comparison_trains_nothing_again(config: CompareConfig, result: dict[str, Any]) -> None:
    """Drafts are written once more, in case a kill came before; states and logs are not touched."""

    def trained() -> tuple[dict[Path, bytes], dict[Path, int]]:
        drafts, states = (list(Path(config.output).glob(f"*/{name}")) for name in ("model.safetensors", "state/*"))
        return {path: path.read_bytes() for path in drafts}, {path: path.stat().st_mtime_ns for path in states}

    before = trained()
    assert [len(files) for files in before] == [2, 2]
    assert compare(config) == result
    assert trained() == before


def test_other_settings_do_not_take_what_was_trained_with_these(config: CompareConfig, result: dict[str, Any]) -> None:
    assert result["settings"]["lr"] == config.lr
    with pytest.raises(CheckpointError, match=r"paper holds a run with lr 0\.0006, now it is 0\.1"):
        compare(config.model_copy(update={"lr": 0.1}))
