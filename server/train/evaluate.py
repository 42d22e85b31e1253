"""`dspark-train eval`: how many draft tokens the target accepts, by domain, through the real engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dspark_core.checkpoint.files import write_atomically
from dspark_core.errors import CheckpointError, RequestError
from dspark_core.sampling import SamplingParams
from dspark_core.train.records import Prompt, read_prompts
from server.config import ServerConfig
from server.engine import Engine
from server.loader import load_engine
from server.offline import complete
from server.request import Request, RequestParams
from server.train.settings import EvalConfig

logger = logging.getLogger(__name__)

LOOPING, NOT_LOOPING = "looping", "not_looping"
# An answer loops when its last tokens repeat with some period, often enough and for long enough to be no list.
_MIN_REPEATS, _MIN_LOOP_TOKENS = 3, 24


@dataclass
class Acceptance:
    """Counts over rounds with drafts. `decided[k]`: rounds in which position k was accepted or rejected."""

    rounds: int = 0
    tokens: int = 0
    prompts: int = 0
    decided: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, request: Request, draft_len: int) -> None:
        self.decided += [0] * (draft_len - len(self.decided))
        self.accepted += [0] * (draft_len - len(self.accepted))
        for decided, accepted in request.decided_and_accepted:
            for k in range(decided):
                self.decided[k] += 1
            for k in range(accepted):
                self.accepted[k] += 1
        self.rounds += request.speculation.rounds
        self.tokens += request.num_generated
        self.prompts += 1

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the bonus token included."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 1.0

    @property
    def by_position(self) -> list[float | None]:
        """Share of position k accepted, among rounds in which all before it were; None where that never happened."""
        return [a / d if d else None for a, d in zip(self.accepted, self.decided, strict=True)]

    def as_json(self) -> dict[str, Any]:
        return {
            "acceptance_length": self.acceptance_length,
            "acceptance_by_position": self.by_position,
            "decided_by_position": self.decided,
            "rounds": self.rounds,
            "tokens": self.tokens,
            "prompts": self.prompts,
        }


@dataclass(frozen=True)
class Answer:
    """What one prompt brought."""

    domain: str
    request: Request

    @property
    def looping(self) -> bool:
        return is_looping(self.request.output_ids)


def is_looping(ids: Sequence[int]) -> bool:
    """Whether a text ends in a repetition: loops are easy to draft, and flatter the figures."""
    for period in range(1, len(ids) // _MIN_REPEATS + 1):
        span = max(_MIN_REPEATS * period, _MIN_LOOP_TOKENS)
        if span <= len(ids) and all(ids[-i] == ids[-i - period] for i in range(1, span - period + 1)):
            return True
    return False


def answer_prompts(
    engine: Engine, prompts: Sequence[Prompt], *, temperature: float, max_tokens: int, where: str
) -> Iterator[Answer]:
    """Answers to all prompts, speculatively, full blocks, in the order they finish."""
    params = RequestParams(SamplingParams(temperature=temperature), max_tokens=max_tokens)

    def jobs() -> Iterator[tuple[str, list[int], RequestParams]]:
        for prompt in prompts:
            yield prompt.domain, engine.tokenizer.encode_chat(prompt.messages), params

    try:
        for domain, request in complete(engine, jobs()):
            yield Answer(domain, request)
    except RequestError as error:
        raise CheckpointError(f"{where}: a prompt cannot be used: {error}") from None


def summarise(answers: Sequence[Answer], draft_len: int) -> dict[str, dict[str, Any]]:
    """Figures by domain; in each, looping answers and the others apart."""
    whole: dict[str, Acceptance] = {}
    apart: dict[str, dict[str, Acceptance]] = {}
    for answer in answers:
        domain, kind = answer.domain, LOOPING if answer.looping else NOT_LOOPING
        whole.setdefault(domain, Acceptance()).add(answer.request, draft_len)
        apart.setdefault(domain, {}).setdefault(kind, Acceptance()).add(answer.request, draft_len)
    return {
        domain: whole[domain].as_json() | {kind: part.as_json() for kind, part in sorted(apart[domain].items())}
        for domain in sorted(whole)
    }


def mean_length(found: dict[str, dict[str, Any]]) -> float:
    """Unweighted mean of the domains' acceptance lengths."""
    return float(sum(row["acceptance_length"] for row in found.values()) / len(found))


def evaluate(config: EvalConfig) -> dict[str, dict[str, Any]]:
    """Measure, print a table, write the JSON file; returns what it holds.

    Raises:
        CheckpointError: a model or the prompts cannot be used.
    """
    prompts = select(read_prompts(Path(config.prompts)), config.limit)
    if config.json_file:  # a folder that cannot be made is known before the measurement
        Path(config.json_file).parent.mkdir(parents=True, exist_ok=True)
    engine = load_engine(
        ServerConfig(
            ckpt=config.ckpt,
            target=config.target,
            dtype=config.dtype,
            device=config.device,
            draft_len=config.draft_len,
            max_num_seqs=config.max_num_seqs,
            seed=config.seed,
            verify="full",
        )
    )
    asked = answer_prompts(
        engine, prompts, temperature=config.temperature, max_tokens=config.max_tokens, where=config.prompts
    )
    found = summarise(list(tqdm(asked, total=len(prompts), unit="answer")), engine.draft_len)
    print(table(found, config.temperature))
    if config.json_file:
        content = json.dumps(found, indent=1)
        write_atomically(Path(config.json_file), lambda file: file.write(content.encode()))
    return found


def select(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """The first `limit` prompts of every domain."""
    seen: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        seen[prompt.domain] = seen.get(prompt.domain, 0) + 1
        if limit is None or seen[prompt.domain] <= limit:
            chosen.append(prompt)
    return chosen


def table(found: dict[str, dict[str, Any]], temperature: float) -> str:
    """The figures for people."""
    head = f"{'temperature ' + format(temperature, 'g'):<20}{'prompts':>8}{'tokens':>8}{'rounds':>8}{'length':>8}"
    lines = [f"{head}  conditional acceptance by position"]
    for domain, row in found.items():
        lines.append(_line(domain, row))
        lines += [_line(f"  {kind}", row[kind]) for kind in (LOOPING, NOT_LOOPING) if kind in row]
    lines.append(f"{'mean of domains':<44}{mean_length(found):>8.3f}")
    return "\n".join(lines)


def _line(name: str, row: dict[str, Any]) -> str:
    shares = " ".join("   -" if share is None else f"{share:.2f}" for share in row["acceptance_by_position"])
    counts = f"{row['prompts']:>8}{row['tokens']:>8}{row['rounds']:>8}{row['acceptance_length']:>8.3f}"
    return f"{name:<20}{counts}  {shares}"
