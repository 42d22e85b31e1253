"""`dspark-train`: answers of the target, cached features, fitting a draft, measuring it, comparing recipes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_core import program
from dspark_core.settings import Parser, Settings, UsageError, flag, public_fields, quote
from dspark_core.sources import Layers, read_toml
from dspark_core.train.config import FEATURES_GROUPS, FIT_GROUPS, FeaturesConfig, FitConfig
from server.train.settings import (
    COMPARE_GROUPS,
    EVAL_GROUPS,
    GENERATE_GROUPS,
    CompareConfig,
    EvalConfig,
    GenerateConfig,
)

PROGRAM = "dspark-train"
PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class Command:
    """A subcommand: what it is told, and what runs it (imported late: torch takes seconds, and --help should not)."""

    settings: type[Settings]
    groups: Mapping[str, str]
    help: str
    run: Callable[[Any], None]


def _generate(config: GenerateConfig) -> None:
    from server.train.generate import generate

    print(f"{generate(config)} answers written to {config.output}")


def _features(config: FeaturesConfig) -> None:
    from dspark_core.train.setup import cache_features

    print(f"features are in {cache_features(config)}")


def _fit(config: FitConfig) -> None:
    from dspark_core.train.trainer import fit

    print(f"the draft is in {fit(config)}; serve it: dspark-serve --ckpt {config.output} --target {config.target}")


def _eval(config: EvalConfig) -> None:
    from server.train.evaluate import evaluate

    evaluate(config)


def _compare(config: CompareConfig) -> None:
    from server.train.compare import compare

    compare(config)


COMMANDS = {
    "generate": Command(GenerateConfig, GENERATE_GROUPS, "let the target answer prompts", _generate),
    "features": Command(FeaturesConfig, FEATURES_GROUPS, "cache the target's hidden states of that data", _features),
    "fit": Command(FitConfig, FIT_GROUPS, "train a draft", _fit),
    "eval": Command(EvalConfig, EVAL_GROUPS, "measure a draft's acceptance through the engine", _eval),
    "compare": Command(CompareConfig, COMPARE_GROUPS, "train variants on the same data and compare them", _compare),
}


def usage() -> str:
    """The page of --help without a command."""
    lines = [f"  {name:<10} {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND [--preset NAME] [--config FILE.toml] [FLAGS]",
            "",
            *lines,
            "",
            f"  {PROGRAM} COMMAND --help lists a command's flags.",
            f"  Presets: {', '.join(presets())}. Values come from the preset, then the file, then the flags.",
        ]
    )


def presets() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def parse(argv: Sequence[str]) -> tuple[Command, Settings]:
    """The command and its settings. Raises UsageError."""
    name, *rest = argv or ["--help"]
    if name not in COMMANDS:
        raise UsageError(f"found {name}, expected a command: {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    parser = Parser(f"{PROGRAM} {name}", description=f"{command.help[0].upper()}{command.help[1:]}.")
    parser.add_argument("--preset", metavar="NAME", help=f"start from a preset: {', '.join(presets())}")
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    parser.add_settings(command.settings, command.groups)
    given = parser.parse_known(rest, ["preset", "config", *public_fields(command.settings)])
    layers = Layers()
    for path in _files(given.pop("preset", None), given.pop("config", None)):
        layers.add_file(path, read_file(path, name))
    layers.add(given, flag)
    return command, layers.build(command.settings)


def _files(preset: str | None, config: str | None) -> list[Path]:
    if preset is not None and preset not in presets():
        raise UsageError(f"--preset: found {quote(preset)}, expected one of {', '.join(presets())}")
    return [*([PRESETS / f"{preset}.toml"] if preset else []), *([Path(config)] if config else [])]


def read_file(path: Path, command: str) -> dict[str, Any]:
    """Settings for a command from a TOML file.

    Keys before the first section apply to every command that has them; a section is for the command of its name, and
    that of fit for compare too.

    Raises:
        UsageError: unreadable, or a key that no command (or not the section's) has.
    """
    content = read_toml(path)
    shared = {key: value for key, value in content.items() if not isinstance(value, dict)}
    known = {name for c in COMMANDS.values() for name in public_fields(c.settings)}
    if unknown := sorted(shared.keys() - known):
        raise UsageError(f"{path}: unknown key {unknown[0]}, expected a setting of {', '.join(COMMANDS)}")
    for section, entries in content.items():
        if not isinstance(entries, dict):
            continue
        if section not in COMMANDS:
            raise UsageError(f"{path}: unknown section [{section}], expected one of {', '.join(COMMANDS)}")
        fields = public_fields(COMMANDS[section].settings)
        if unknown := sorted(entries.keys() - fields):
            raise UsageError(f"{path}: unknown key {unknown[0]} in [{section}], expected one of {', '.join(fields)}")
    own = public_fields(COMMANDS[command].settings)
    values = {key: value for key, value in shared.items() if key in own}
    if command == "compare":  # what every arm starts from is said once, in the section of fit
        values |= {key: value for key, value in content.get("fit", {}).items() if key != "output"}
    values |= content.get(command, {})
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (see `dspark_core.program.run`)."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0

    def parsed() -> Callable[[], None]:
        command, settings = parse(arguments)
        return lambda: command.run(settings)

    return program.run(PROGRAM, parsed, interrupted="the same command goes on from the last checkpoint or record")


if __name__ == "__main__":
    sys.exit(main())
