"""Running a command-line program of several commands: what it prints when it cannot, and its exit code."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from dspark_core.errors import CheckpointError, RunError
from dspark_core.settings import UsageError

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run(program: str, parse: Callable[[], Callable[[], None]], *, interrupted: str) -> int:
    """Parse, then do what was asked for; the exit code is 0 done, 1 could not be done, 2 wrong usage, 130 interrupted.

    Args:
        parse: returns what is to be done; raises UsageError.
        interrupted: what to say when the user stops it.
    """
    try:
        work = parse()
    except UsageError as error:
        return fail(program, str(error), 2)
    logging.basicConfig(level="INFO", format=LOG_FORMAT)
    try:
        work()
    except KeyboardInterrupt:
        return fail(program, f"interrupted; {interrupted}", 130)
    except (CheckpointError, RunError, OSError, ModuleNotFoundError) as error:
        return fail(program, _words(error), 1)
    return 0


def fail(program: str, message: str, code: int) -> int:
    """Say it on the error output; returns the code."""
    print(f"{program}: error: {message}", file=sys.stderr)
    return code


def _words(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed, expected it: pip install 'dspark[train]'"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)
