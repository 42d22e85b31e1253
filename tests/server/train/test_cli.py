"""`dspark-train`: where values come from, wrong usage, help, exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark_core.errors import CheckpointError, RunError
from dspark_core.settings import Settings, flag, public_fields
from dspark_core.train.config import FeaturesConfig, FitConfig
from dspark_core.train.folder import TrainingError
from server.offline import GenerationError
from server.train import cli
from server.train.settings import CompareConfig, EvalConfig, GenerateConfig
from tests.server.http_util import DEADLINE_S

ROOT = Path(__file__).parents[3]
# What no file can know: the least that a command must be told.
NEEDED = {
    "generate": ["--prompts", "p.jsonl", "--output", "o"],
    "features": ["--data", "d.jsonl", "--output", "o", "--target-layer-ids", "1,2"],
    "fit": ["--data", "d.jsonl", "--output", "o"],
    "eval": ["--prompts", "p.jsonl"],
    "compare": ["--data", "d.jsonl", "--output", "o", "--prompts", "p.jsonl"],
}
PUBLISHED = ("gemma4-12b", "qwen3-14b", "qwen3-4b", "qwen3-8b")


def parse(*argv: str) -> Any:
    return cli.parse(argv)[1]


@pytest.fixture
def toml(tmp_path: Path) -> Callable[[str], str]:
    def write(content: str) -> str:
        path = tmp_path / "my.toml"
        path.write_text(content, encoding="utf-8")
        return str(path)

    return write


def test_every_command_has_its_settings() -> None:
    found = {name: type(parse(name, *needed)) for name, needed in NEEDED.items()}
    assert found == {
        "generate": GenerateConfig,
        "features": FeaturesConfig,
        "fit": FitConfig,
        "eval": EvalConfig,
        "compare": CompareConfig,
    }
    assert cli.COMMANDS.keys() == NEEDED.keys()


def test_the_preset_gives_way_to_the_file_and_the_file_to_the_flags(toml: Callable[[str], str]) -> None:
    config = toml("lr = 1e-3\nloss_decay = 5.0\nmax_length = 100\n")
    found = parse("fit", *NEEDED["fit"], "--preset", "qwen3-4b", "--config", config, "--loss-decay", "6")
    assert (found.max_length, found.lr, found.loss_decay) == (100, 1e-3, 6.0)
    assert (found.target, found.mask_token_id) == ("Qwen/Qwen3-4B", 151669), "of the preset"
    assert found.weight_decay == 0.0, "of nobody: the default"
    assert parse("fit", *NEEDED["fit"], "--config", config, "--preset", "qwen3-4b").lr == 1e-3, "in any order"


def test_a_section_wins_over_the_keys_before_it(toml: Callable[[str], str]) -> None:
    config = toml('target = "t"\nmax_length = 50\nseed = 3\n[fit]\nmax_length = 60\n[features]\nbatch_tokens = 9\n')
    fit, features, generate = (
        parse(name, *NEEDED[name], "--config", config) for name in ("fit", "features", "generate")
    )
    assert (fit.target, fit.max_length, fit.seed) == ("t", 60, 3)
    assert (features.target, features.max_length, features.batch_tokens) == ("t", 50, 9), "which has no seed"
    assert (generate.target, generate.seed) == ("t", 3), "which has no max_length"


def test_every_arm_starts_from_what_the_section_of_fit_says(toml: Callable[[str], str]) -> None:
    config = toml('lr = 1e-3\n[fit]\nlr = 2e-3\nepochs = 3\nnum_layers = 2\noutput = "x"\n[compare]\nepochs = 4\n')
    found = parse("compare", "--data", "d", "--prompts", "p", "--config", config, "--output", "o")
    assert (found.lr, found.num_layers, found.epochs) == (2e-3, 2, 4)
    assert cli.main(["compare", "--data", "d", "--prompts", "p", "--config", config]) == 2, "output is the run's own"


def test_lists_and_switches_come_as_toml_has_them(toml: Callable[[str], str]) -> None:
    assert parse("fit", *NEEDED["fit"], "--target-layer-ids", "-1,3").target_layer_ids == (-1, 3)
    config = toml('data = ["a", "b"]\noutput = "o"\ntarget_layer_ids = [-1, 2]\ncompile = true\nepochs = 3\n')
    found = parse("fit", "--config", config)
    assert (found.data, found.target_layer_ids, found.compile, found.epochs) == (("a", "b"), (-1, 2), True, 3)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fitt"], "found fitt, expected a command: generate, features, fit, eval, compare"),
        (["--preset", "qwen3-4b", "fit"], "found --preset, expected a command"),
        (["fit", *NEEDED["fit"], "--preset", "qwen4"], '--preset: found "qwen4", expected one of '),
        (["fit", *NEEDED["fit"], "--preset", "../presets/qwen3-4b"], "--preset: found "),
        (["fit", "--data", "d"], "--output: missing, expected a value"),
        (["fit", *NEEDED["fit"], "--lr", "0"], '--lr: found "0", expected greater than 0'),
        (["fit", *NEEDED["fit"], "--learning-rate", "1"], "unknown argument --learning-rate, expected one of --preset"),
        (["fit", *NEEDED["fit"], "--presets", "x"], "unknown argument --presets, expected --preset"),
        (["fit", *NEEDED["fit"], "file.jsonl"], "unknown argument file.jsonl, expected "),
        (["eval", *NEEDED["eval"], "--json-file", "x"], "unknown argument --json-file, expected "),
        (["eval", *NEEDED["eval"], "--ckpt"], "argument --ckpt: expected one argument"),
        (["compare", *NEEDED["compare"], "--arms", "paper,papers"], "--arms: found 'papers', expected some of paper, "),
        (["fit", *NEEDED["fit"], "--config", "/nowhere.toml"], "/nowhere.toml cannot be read as TOML: "),
        (["compare", *NEEDED["compare"], "--arms", ""], "--arms: found '', expected some of paper, "),
        (["fit", "--output", "o"], "expected exactly one of data and features"),
        (["fit", *NEEDED["fit"], "--row-tokens", "8"], "row_tokens is 8, expected at least max_length (4096)"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"dspark-train: error: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("lr = \n", "my.toml cannot be read as TOML: "),
        ("lr = 1\nlr = 2\n", "my.toml cannot be read as TOML: "),
        ("learning_rate = 1\n", "my.toml: unknown key learning_rate, expected a setting of generate, features, fit"),
        ("json_file = 'x'\n", "my.toml: unknown key json_file"),
        ("fit = 3\n", "my.toml: unknown key fit"),
        ("[[fit]]\nlr = 1\n", "my.toml: unknown key fit"),
        ("[train]\nlr = 1\n", "my.toml: unknown section [train], expected one of generate, features, fit, eval, "),
        ("[fit]\nprompts = 'x'\n", "my.toml: unknown key prompts in [fit], expected one of target, data, "),
        ("[eval]\nlr = 1\n", "my.toml: unknown key lr in [eval]"),  # also a section of another command
        ("lr = 'high'\n", 'my.toml: lr: found "high", expected a valid number'),
        ("[fit]\nlr = nan\n", "my.toml: lr: found NaN, expected a finite number"),
        ("target_layer_ids = [1, 'x']\n", 'my.toml: target_layer_ids: found "x", expected a valid integer'),
        ("[fit.lr]\nvalue = 1\n", 'my.toml: lr: found {"value": 1}, expected a valid number'),
    ],
)
def test_a_file_that_is_wrong_is_one_line_that_names_it(
    content: str, message: str, toml: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fit", *NEEDED["fit"], "--config", toml(content)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_file_that_is_no_text_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.toml").write_bytes(b"lr = '\xff'\n")
    assert cli.main(["fit", *NEEDED["fit"], "--config", str(tmp_path / "my.toml")]) == 2
    assert "my.toml cannot be read as TOML: " in capsys.readouterr().err


@pytest.mark.parametrize("preset", cli.presets())
def test_every_preset_is_complete_but_for_the_files(preset: str) -> None:
    fit, generate = (parse(name, *NEEDED[name], "--preset", preset) for name in ("fit", "generate"))
    features = parse("features", "--data", "d", "--output", "o", "--preset", preset)
    assert fit.target == features.target == generate.target
    assert fit.target_layer_ids == features.target_layer_ids
    assert len(fit.target_layer_ids) == 5
    assert fit.max_length == features.max_length
    assert parse("compare", *NEEDED["compare"], "--preset", preset).num_layers == fit.num_layers


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_of_published_drafts_have_their_recipe_and_say_where_the_paper_differs(preset: str) -> None:
    fit = parse("fit", *NEEDED["fit"], "--preset", preset)
    assert (fit.draft_len, fit.num_layers, fit.decay) == (7, 5, 4.0)
    assert "loss_decay is 4.0" in (cli.PRESETS / f"{preset}.toml").read_text()


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_the_page_of_help_names_commands_and_presets(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert [word for word in (*cli.COMMANDS, *cli.presets()) if word not in out] == []


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_a_command_shows_every_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in public_fields(cli.COMMANDS[command].settings).items():
        assert f"{flag(name)} " in text
        assert str(field.description) in text
    for title in cli.COMMANDS[command].groups.values():
        assert f"{title}:" in text


def test_help_and_complaints_need_no_torch() -> None:
    code = """
import contextlib, sys
from server.train import cli
for argv in [[], ["--help"], ["fit", "--lr", "x"], *([name, "--help"] for name in cli.COMMANDS)]:
    with contextlib.suppress(SystemExit):
        cli.main(argv)
sys.exit("torch" in sys.modules)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=DEADLINE_S, capture_output=True, text=True)
    assert done.stdout.count("usage: dspark-train") == 2 + len(cli.COMMANDS)


def raising(error: BaseException) -> Callable[[Settings], None]:
    def run(config: Settings) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CheckpointError("it is bad"), 1, "it is bad\n"),
        (RunError("it stopped"), 1, "it stopped\n"),
        (GenerationError("it broke"), 1, "it broke\n"),
        (TrainingError("it is NaN"), 1, "it is NaN\n"),
        (PermissionError(13, "Permission denied", "/x"), 1, "/x: Permission denied\n"),
        (OSError("the hub is away"), 1, "the hub is away\n"),
        (ModuleNotFoundError("no", name="x"), 1, "x is not installed, expected it: pip install 'dspark[train]'\n"),
        (KeyboardInterrupt(), 130, "interrupted; the same command goes on from the last "),
    ],
)
def test_what_could_not_be_done_is_one_line(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "fit", replace(cli.COMMANDS["fit"], run=raising(error)))
    assert cli.main(["fit", *NEEDED["fit"]]) == code
    err = capsys.readouterr().err
    assert err.startswith(f"dspark-train: error: {message}")
    assert err.count("\n") == 1


def test_a_bug_shows_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "fit", replace(cli.COMMANDS["fit"], run=raising(RuntimeError("a bug"))))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["fit", *NEEDED["fit"]])


@pytest.mark.parametrize("command", ["generate", "eval", "compare"])
def test_a_file_that_is_missing_is_exit_code_1(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, *NEEDED[command], "--prompts", "/nowhere/p.jsonl"]) == 1
    assert capsys.readouterr().err.startswith("dspark-train: error: /nowhere/p.jsonl cannot be read: ")
