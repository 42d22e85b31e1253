"""The calibration report: its figures, the bar it holds the product to, and a page that needs nothing else."""

from __future__ import annotations

import base64
import json
import re
import sys
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.records import Records, joined, split_by_prompt
from calibration.report import summary, write_report
from calibration.split import fit_split
from calibration.sts import evaluate, fit_platt, fit_regimes, raw
from dspark_core.sampling import REGIMES
from dspark_core.step_cost import CostCurves, StepCost
from server.profile import Profile
from tests.calibration.samples import sampled

DISTORTED = [2.5, 0.4]
PNG = b"\x89PNG\r\n\x1a\n"


def mixed(count: int = 1500) -> Records:
    """All regimes; two domains, one with a name that is HTML; two temperatures."""
    parts = []
    for number in range(len(REGIMES)):
        part = sampled(count, DISTORTED, seed=number)
        place = np.arange(count)
        parts.append(
            replace(
                part,
                regime=np.full(count, number),
                domain=part.prompt % 2,
                temperature=np.where(place % 2, 0.7, 1.0),
                domains=("<b>chat", "code"),
            )
        )
    return joined(parts)


def measured(kinds: tuple[str, ...] = ("verify", "draft")) -> Profile:
    medians = {
        (kind, context, requests, each): 0.01 * requests * each
        for kind, context, requests, each in [
            ("verify", 64, 1, 1),
            ("verify", 64, 1, 3),
            ("verify", 64, 2, 3),
            ("verify", 256, 1, 3),
            ("draft", 64, 1, 1),
            ("draft", 64, 1, 2),
            ("draft", 64, 2, 2),
        ]
        if kind in kinds
    }
    curves = CostCurves([1, 3, 6], [0.01, 0.03, 0.06], [1, 2], [0.01, 0.02], [0.02, 0.04], 2)
    return Profile(StepCost(curves, 64), medians, {" ".join(map(str, key)): 0.1 for key in medians})


def write(folder: Path, records: Records, profile: Profile | None = None, **others: Any) -> dict[str, Any]:
    split = replace(fit_split(records, 0.4, "sts"), **others)
    return write_report(folder, split, profile=profile, conditions={"draft": "<i>demo", "date": "today"}, resamples=20)


def strict(path: Path) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "below" / "report"
    returned = write(folder, mixed(), measured())
    assert strict(folder / "report.json") == returned
    return folder


class Page(HTMLParser):
    """What a page refers to, its tags, and whether they are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "srcset", "href", "data", "action")]
        if tag not in ("meta", "img", "source", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_holds_every_plot_and_asks_for_nothing_outside(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        "report.json",
        "report.html",
        "reliability.png",
        "thresholds.png",
        "step_cost.png",
    }
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open
    assert "://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert len(page.links) == 6  # three plots, light and dark
    images = [base64.b64decode(link.removeprefix("data:image/png;base64,"), validate=True) for link in page.links]
    assert all(image.startswith(PNG) for image in images)
    assert len(set(images)) == 6
    assert page.tags.count("picture") == page.tags.count("source") == page.tags.count("img") == 3
    light = images[1::2]  # a picture's sources come first, and the page names those for dark screens there
    assert sorted(path.read_bytes() for path in folder.glob("*.png")) == sorted(light)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_names_are_escaped_and_conditions_shown(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    words = Page(text).words
    assert "domain <b>chat" in words
    assert "<i>demo" in words
    assert "today" in words
    assert "<b>" not in text
    assert "<i>" not in text


def test_figures_are_those_of_evaluate_on_each_part(folder: Path) -> None:
    report = strict(folder / "report.json")
    fitted_on, judged = split_by_prompt(mixed(), 0.4)
    assert list(report["regimes"]) == list(REGIMES)
    for number, regime in enumerate(REGIMES):
        part = report["regimes"][regime]
        own, learned = judged.of(judged.regime == number), fitted_on.of(fitted_on.regime == number)
        assert part["rounds"] == {"fitted_on": len(learned), "judged": len(own)}
        fit = fit_regimes(fitted_on)[regime]
        assert [row["temperature"] for row in part["fit"]] == list(fit.temperatures)
        calibrators = {"raw": raw(2), "sts": fit.calibrator, "platt": fit_platt(learned)}
        rows = {
            ("all", ""): own,
            ("domain", "<b>chat"): own.of(own.domain == 0),
            ("domain", "code"): own.of(own.domain == 1),
            ("temperature", "0.7"): own.of(own.temperature == 0.7),
            ("temperature", "1"): own.of(own.temperature == 1.0),
        }
        assert [(piece["by"], piece["name"]) for piece in part["slices"]] == list(rows)
        for piece, chosen in zip(part["slices"], rows.values(), strict=True):
            assert piece["rounds"] == len(chosen)
            for method, calibrator in calibrators.items():
                found = evaluate(chosen, calibrator, np.random.default_rng(0), resamples=20)
                expected = json.loads(json.dumps([asdict(row) for row in found]))
                assert piece["positions"][method] == expected, (regime, piece["name"], method)


def test_a_known_distortion_is_mended_and_meets_the_bar(tmp_path: Path) -> None:
    report = write(tmp_path, sampled(12_000, DISTORTED))
    part = report["regimes"]["ratio"]
    assert [verdict["status"] for verdict in part["bar"]] == ["meets", "meets"]
    assert [verdict["position"] for verdict in part["bar"]] == [1, 2]
    errors = {m: [row["ece"] for row in rows] for m, rows in part["slices"][0]["positions"].items()}
    assert part["best"]["mean"] == pytest.approx({m: sum(values) / 2 for m, values in errors.items()})
    assert part["best"]["in_the_mean"] == min(errors, key=lambda m: sum(errors[m]))
    assert part["best"]["by_position"] == [min(errors, key=lambda m: errors[m][k]) for k in range(2)]
    assert part["best"]["in_the_mean"] != "raw"


def test_the_bar_is_held_against_what_the_server_uses(tmp_path: Path) -> None:
    """A head whose promises are too high throughout: no temperature mends that."""
    records = sampled(12_000, [1.0, 1.0])
    shifted = replace(records, logits=records.logits + 1.0)
    reports = [write(tmp_path, shifted, method=method) for method in ("sts", "platt")]
    verdicts = [[verdict["status"] for verdict in report["regimes"]["ratio"]["bar"]] for report in reports]
    assert verdicts == [["misses", "misses"], ["meets", "meets"]]
    assert [report["method"] for report in reports] == ["sts", "platt"]
    words = re.sub(r"\s+", " ", Page((tmp_path / "report.html").read_text(encoding="utf-8")).words)
    assert "The server uses Platt here" in words
    assert summary(reports[1]).splitlines()[0].endswith("bar, of Platt")


def test_one_regime_one_domain_and_no_profile(tmp_path: Path) -> None:
    report = write(tmp_path, sampled(600, [1.0]))
    assert list(report["regimes"]) == ["ratio"]
    assert report["step_cost"] is None
    assert report["not_judged"] == []
    assert not (tmp_path / "step_cost.png").exists()
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert len(page.links) == 4
    assert "domain chat: " in page.words


def test_slots_that_were_never_drafted_and_costs_without_a_draft(tmp_path: Path) -> None:
    records = sampled(300, [1.0, 1.0])
    records.logits[:, 1] = np.nan
    report = write(tmp_path, records, measured(("verify",)))
    assert strict(tmp_path / "report.json") == report
    part = report["regimes"]["ratio"]
    assert part["slices"][0]["positions"]["sts"][1]["ece"] is None
    assert part["best"]["by_position"][1] is None
    assert part["reliability"]["sts"][1] == []
    assert part["bar"][1]["status"] == "too few"
    assert (tmp_path / "step_cost.png").read_bytes().startswith(PNG)


def test_positions_of_equal_verdicts_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path, sampled(300, [1.0, 1.0, 1.0]))
    words = Page((tmp_path / "report.html").read_text(encoding="utf-8")).words
    assert "meets it nowhere; has too few to judge at position 1, 2, 3." in re.sub(r"\s+", " ", words)


def test_a_regime_without_held_out_rounds_is_named(tmp_path: Path) -> None:
    _, judged = split_by_prompt(mixed(300), 0.4)
    report = write(tmp_path, mixed(300), judged=judged.of(judged.regime != 0))
    assert list(report["regimes"]) == list(REGIMES[1:])
    assert report["not_judged"] == [REGIMES[0]]
    assert f"{REGIMES[0]}: no rounds on one side" in Page((tmp_path / "report.html").read_text(encoding="utf-8")).words


def test_without_matplotlib_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delattr("calibration.report.evaluate")  # it is known before any figure is computed
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        write(tmp_path / "report", sampled(100, [1.0]))
    assert list(tmp_path.iterdir()) == []


def test_the_summary_is_one_table(folder: Path) -> None:
    report = strict(folder / "report.json")
    head, *lines = summary(report).splitlines()
    assert " ".join(head.split()) == "regime position accepted rejected temperature raw ECE STS Platt bar, of STS"
    assert len(lines) == 6
    part = report["regimes"]["ratio"]
    row = part["slices"][0]["positions"]["sts"][1]
    line = next(line for line in lines if line.split()[:2] == ["ratio", "2"])
    assert line.split()[2:4] == [str(row["num_accepted"]), str(row["num_rejected"])]
    assert f"{100 * row['ece']:.1f} %" in line
    assert part["bar"][1]["status"] in line
