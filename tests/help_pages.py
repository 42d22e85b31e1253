"""docs/cli.md from the programs' own help: `python -m tests.help_pages` writes it, a test compares.

A new program needs a line in PROGRAMS.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from unittest.mock import patch

from calibration import cli as calibrate
from server import cli as serve
from server.chat import cli as chat
from server.train import cli as train

PATH = Path(__file__).parents[1] / "docs" / "cli.md"
WIDTH = 120
# Each program's entry point, and the arguments before --help of every page.
PROGRAMS: dict[str, tuple[Callable[[list[str]], int], list[list[str]]]] = {
    "dspark-serve": (serve.main, [[]]),
    "dspark-train": (train.main, [[], *([name] for name in train.COMMANDS)]),
    "dspark-chat": (chat.main, [[]]),
    "dspark-calibrate": (calibrate.main, [[]]),
}
INTRODUCTION = """# Command-line programs

What `--help` prints, written by `python -m tests.help_pages`; do not edit by hand.

Where the settings of `dspark-serve` come from: a flag, else its environment variable, else the file of `--config`,
else the default.

```bash
dspark-serve --max-num-seqs 8 --prefix-cache false --check     # a flag that is true or false may stand alone
DSPARK_MAX_NUM_SEQS=8 DSPARK_API_KEY=key-1,key-2 dspark-serve   # lists are separated by commas
dspark-serve --config serve.toml                               # or DSPARK_CONFIG=serve.toml
```

```toml
# serve.toml
max_num_seqs = 8
cors_origins = ["https://example.org"]
```

A value that cannot be used, an unknown flag and an unknown key of the file stop the program with exit code 2 and one
line that names the flag, the variable, or the file and key. Another variable that begins with `DSPARK_` is a warning in
the log, except those that are no settings: `DSPARK_CACHE` (where models and measurements are kept),
`DSPARK_DEMO_WHEEL`, and `DSPARK_VENV`, `DSPARK_PYTHON`, `DSPARK_CONSTRAINTS` of the scripts. Kubernetes sets
`DSPARK_PORT` to an address of its own where a service is called `dspark`: call it otherwise, or set
`enableServiceLinks: false`.

* `--check` loads everything, prints what would be served (weights, KV memory, capacity, calibration, step costs,
  policy), and ends with 0, or with 1 and the reason. It listens on no port.
* `--api-key`: all endpoints then need `Authorization: Bearer KEY`, `/metrics` included; `/health`, `/version`, and the
  page at `/` with its files do not.
* `/health` answers 200 while requests are served; 503 with `{"status": "loading"}` before that, with
  `{"status": "draining"}` after a signal to stop, and with an error when the engine is dead.
* After SIGTERM or SIGINT new requests get 503 with `Retry-After`, running ones go on for `--drain-seconds`, and what is
  left then ends with an error. The exit code is 0. A second signal ends at once.
* `--request-timeout`: a request that takes longer is answered 504 (408 if its body was not there in time); a stream
  ends with an event of an `error`, and `[DONE]`.
* The log is on the error output, a line for every request when it ends: `request_id` (the client's `X-Request-Id` if it
  is up to 128 printable ASCII characters, else a new one; every answer has it), `status` (499: the client went first),
  `milliseconds`, and where tokens were generated `prompt_tokens`, `completion_tokens`, `finish_reason`,
  `acceptance_length`; `error` is the code of what went wrong, of a stream that was cut too.
"""


def page(main: Callable[[list[str]], int], arguments: list[str]) -> str:
    """What a program prints for --help, whatever the terminal."""
    printed = io.StringIO()
    plain = patch.dict(os.environ, {"COLUMNS": str(WIDTH), "NO_COLOR": "1"})
    with plain, redirect_stdout(printed), suppress(SystemExit):
        main([*arguments, "--help"])
    return printed.getvalue().strip()


def sections() -> Iterator[str]:
    """The document, part by part."""
    yield INTRODUCTION
    for program, (main, pages) in PROGRAMS.items():
        yield f"## {program}\n"
        for arguments in pages:
            yield f"```text\n$ {' '.join([program, *arguments, '--help'])}\n{page(main, arguments)}\n```\n"


def document() -> str:
    """All of docs/cli.md."""
    return "\n".join(sections())


if __name__ == "__main__":
    PATH.write_text(document(), encoding="utf-8")
