"""`dspark-calibrate`: measure a draft's confidence and the machine's step costs, once, before serving."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibration.settings import GROUPS, CalibrateConfig
from dspark_core import program
from dspark_core.settings import Parser, UsageError, build, public_fields

PROGRAM = "dspark-calibrate"


@dataclass(frozen=True)
class Command:
    """What to do, in one line, and what does it (imported late: torch takes seconds, and --help should not)."""

    help: str
    run: Callable[[CalibrateConfig], None]


def _all(config: CalibrateConfig) -> None:
    from calibration import plots, run

    plots.need()  # what is missing is known before minutes of work, not after

    places = run.places_of(config)
    engine, origin = run.load(config)
    run.run_collect(config, places, engine, origin)  # first: it may refuse, and nothing is overwritten then
    profile = run.run_profile(config, places, engine, origin)
    split = run.run_fit(config, places)
    _report_on(config, places, split, profile)


def _collect(config: CalibrateConfig) -> None:
    from calibration import run

    places = run.places_of(config)
    count = run.run_collect(config, places, *run.load(config))
    print(f"{count} answers were added to {places.records}")


def _fit(config: CalibrateConfig) -> None:
    from calibration import run

    places = run.places_of(config)
    split = run.run_fit(config, places)
    for regime, calibrator in split.chosen.items():
        scales, biases = (" ".join(f"{v:.3g}" for v in values) for values in (calibrator.scales, calibrator.biases))
        print(f"{regime:<8} scales {scales}, biases {biases}")
    print(f"written to {places.folder / 'calibration.json'}")


def _profile(config: CalibrateConfig) -> None:
    from calibration import run

    places = run.places_of(config)
    curves = run.run_profile(config, places, *run.load(config)).cost.curves
    for tokens, seconds in zip(curves.tokens, curves.verify, strict=True):
        print(f"{tokens:>5} tokens verified in {seconds * 1e3:8.2f} ms")
    print(f"written to {places.folder / 'step_cost.json'}")


def _report(config: CalibrateConfig) -> None:
    from calibration import run

    places = run.places_of(config)
    _report_on(config, places, run.read_split(config, places), None)


def _report_on(config: CalibrateConfig, places: Any, split: Any, profile: Any) -> None:
    from calibration import run
    from calibration.report import summary, write_report

    conditions = run.conditions(config, places)
    found = write_report(places.work, split, profile=profile, conditions=conditions, bins=config.bins)
    print(summary(found))
    where = f"calibration.json and step_cost.json are in {places.folder}"
    print(
        f"{where}: name them with --calibration and --step-cost" if config.output else f"{where}: the server finds them"
    )
    print(f"to look at: {Path(places.work) / 'report.html'}")


COMMANDS = {
    "collect": Command("answers through the engine with whole blocks, every round recorded; resumes", _collect),
    "fit": Command("fit temperatures to the records and write calibration.json", _fit),
    "profile": Command("measure what steps cost here and write step_cost.json", _profile),
    "report": Command("figures and plots of the records and the fit", _report),
}
ALL = Command("all four, in about five minutes on the demo", _all)


def usage() -> str:
    """The page of --help."""
    lines = [f"  {name or '(none)':<10} {command.help}" for name, command in {"": ALL, **COMMANDS}.items()]
    flags = parser_of(PROGRAM, ALL).format_help().split("\n\n", 1)[1]
    return "\n".join([f"usage: {PROGRAM} [COMMAND] [FLAGS]", "", "commands:", *lines, "", flags])


def parser_of(name: str, command: Command) -> Parser:
    parser = Parser(name, description=f"{command.help[0].upper()}{command.help[1:]}.")
    parser.add_settings(CalibrateConfig, GROUPS)
    return parser


def parse(argv: Sequence[str]) -> tuple[Command, CalibrateConfig]:
    """The command and its settings. Raises UsageError."""
    named = bool(argv) and not argv[0].startswith("-")
    if named and argv[0] not in COMMANDS:
        raise UsageError(f"found {argv[0]}, expected a command: {', '.join(COMMANDS)}, or none for all of them")
    command, rest = (COMMANDS[argv[0]], argv[1:]) if named else (ALL, argv)
    parser = parser_of(f"{PROGRAM} {argv[0]}" if named else PROGRAM, command)
    return command, build(CalibrateConfig, parser.parse_known(list(rest), public_fields(CalibrateConfig)))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (see `dspark_core.program.run`)."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] in (["-h"], ["--help"]):
        print(usage())
        return 0

    def parsed() -> Callable[[], None]:
        command, config = parse(arguments)
        return lambda: command.run(config)

    return program.run(PROGRAM, parsed, interrupted="the same command goes on from the last answer")


if __name__ == "__main__":
    sys.exit(main())
