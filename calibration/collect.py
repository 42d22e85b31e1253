"""`dspark-calibrate collect`: answers through the real engine, every block verified in full, every round recorded."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from calibration.records import Records
from calibration.settings import DEFAULT_PROMPTS, CalibrateConfig
from dspark_core.checkpoint.files import locked
from dspark_core.errors import CheckpointError, RequestError
from dspark_core.keys import Keys
from dspark_core.randomness import derive_key
from dspark_core.sampling import REGIMES, Regime, SamplingParams
from dspark_core.train.records import Prompt, append_record, read_lines, read_prompts, resume_records
from server.engine import Engine
from server.offline import complete
from server.policy import LengthPolicy, Rounds
from server.request import RequestParams

logger = logging.getLogger(__name__)

RECORDS_FILE = "records.jsonl"


@dataclass(frozen=True, order=True)
class Task:
    """One answer: the prompt's number in the file, and how its tokens are chosen."""

    prompt: int
    regime: Regime
    temperature: float

    @property
    def id(self) -> str:
        return f"{self.prompt}-{self.regime}-{self.temperature}"

    def params(self, config: CalibrateConfig) -> RequestParams:
        seed = derive_key("calibrate", config.seed, self.id) if self.regime == "coupled" else None
        return RequestParams(SamplingParams(temperature=self.temperature, seed=seed), max_tokens=config.max_tokens)


def load_prompts(config: CalibrateConfig) -> list[Prompt]:
    """The prompts asked for. Raises CheckpointError: unreadable, or one alone of a domain, with nothing to judge by."""
    path = Path(config.prompts) if config.prompts else DEFAULT_PROMPTS
    prompts = read_prompts(path)
    for domain, count in Counter(prompt.domain for prompt in prompts).items():
        if count < 2:
            raise CheckpointError(f"{path}: one prompt of domain '{domain}', expected two or more: one is judged by")
    return prompts


def make_tasks(config: CalibrateConfig, prompts: Sequence[Prompt]) -> list[Task]:
    """Answers to collect: each prompt greedily, and under the other rules at every temperature.

    In the order in which the most is learnt: domains and rules take turns, and a prompt comes again under a rule only
    when all others had theirs, for it is different prompts that are scarce.
    """
    turns: dict[tuple[str, Regime], list[tuple[int, int, Task]]] = {}
    for number, prompt in enumerate(prompts):
        for regime in REGIMES:
            tasks = [Task(number, regime, t) for t in ((0.0,) if regime == "greedy" else config.temperatures)]
            keys = sorted((derive_key("order", config.seed, task.id), task) for task in tasks)
            turns.setdefault((prompt.domain, regime), []).extend((i, key, task) for i, (key, task) in enumerate(keys))
    places = [(place, task) for tasks in turns.values() for place, (_, _, task) in enumerate(sorted(tasks))]
    return [task for _, task in sorted(places)][: config.answers]


def collect(config: CalibrateConfig, engine: Engine, path: Path, origin: Mapping[str, Any]) -> int:
    """Complete the records at `path`; returns the number of answers written.

    Raises:
        CheckpointError: a schedule is active, there is no confidence head, the file was begun with other settings, or
            a prompt does not fit.
    """
    check_unscheduled(engine)
    prompts = load_prompts(config)
    settings = {
        "origin": dict(origin),
        "prompts": [[prompt.domain, prompt.messages] for prompt in prompts],
        "temperatures": list(config.temperatures),
        "max_tokens": config.max_tokens,
        "seed": config.seed,
    }
    with locked(path):
        done = {record["id"] for record in resume_records(path, settings)}
        todo = [task for task in make_tasks(config, prompts) if task.id not in done]
        if done and todo:
            logger.info("%s: %d answers are there, %d to come", path, len(done), len(todo))
        return _answer(config, engine, path, prompts, todo)


def check_unscheduled(engine: Engine) -> None:
    """Records of blocks that a schedule cut short would be those that looked good: refuse them."""
    if type(engine.policy) is not LengthPolicy:
        raise CheckpointError(
            f"records need whole blocks, and {type(engine.policy).__name__} is active; expected --verify full"
        )
    if engine.drafter is None or engine.drafter.model.confidence_head is None:
        raise CheckpointError("this draft has no confidence head: there is nothing to calibrate")


def _answer(
    config: CalibrateConfig, engine: Engine, path: Path, prompts: Sequence[Prompt], todo: Sequence[Task]
) -> int:
    rounds: dict[int, list[dict[str, Any]]] = {}

    def note(found: Rounds) -> None:
        assert found.logits is not None
        assert (found.verified == found.drafted).all(), "a block was not verified in full"
        for row, request in enumerate(found.requests):
            record = {
                "logits": found.logits[row, : found.drafted[row]].tolist(),
                "decided": int(found.decided[row]),
                "accepted": int(found.accepted[row]),
            }
            rounds.setdefault(id(request), []).append(record)

    def jobs() -> Iterator[tuple[Task, list[int], RequestParams]]:
        for task in todo:
            yield task, engine.tokenizer.encode_chat(prompts[task.prompt].messages), task.params(config)

    engine.observers.append(note)
    engine.reads_confidence = True
    try:
        with path.open("ab") as file, tqdm(total=len(todo), unit="answer", desc="collect", disable=not todo) as bar:
            for task, request in complete(engine, jobs()):
                found = rounds.pop(id(request), [])
                record = {
                    "id": task.id,
                    "prompt": task.prompt,
                    "domain": prompts[task.prompt].domain,
                    "regime": task.regime,
                    "temperature": task.temperature,
                    "rounds": found,
                }
                append_record(file, record)
                bar.update()
    except RequestError as error:
        raise CheckpointError(f"{config.prompts or DEFAULT_PROMPTS}: a prompt cannot be used: {error}") from None
    finally:
        engine.observers.remove(note)
        engine.reads_confidence = False
    return len(todo)


def read_records(path: Path, draft_len: int) -> Records:
    """Records of a file; rounds whose confidence is not a number are left out, with a warning.

    Raises:
        CheckpointError: unreadable, or no round is left.
    """
    rows: list[tuple[Any, ...]] = []
    dropped = 0
    for keys in read_lines(path):
        name = keys.get("regime", str)
        if name not in REGIMES:
            raise CheckpointError(f"{keys.where}: regime {name!r}, expected {', '.join(REGIMES)}")
        temperature, domain = float(keys.get("temperature", (int, float))), keys.get("domain", str)
        place = temperature, REGIMES.index(name), domain, keys.get("prompt", int)
        for found in keys.get("rounds", list):
            logits, decided, accepted = _read_round(found, keys.where, draft_len)
            if any(map(math.isnan, logits)):
                dropped += 1
                continue
            rows.append((logits + [math.nan] * (draft_len - len(logits)), decided, accepted, *place))
    if dropped:
        logger.warning("%s: %d rounds without a number for confidence were left out", path, dropped)
    if not rows:
        raise CheckpointError(f"{path} holds no round that can be used")
    columns = list(zip(*rows, strict=True))
    domains = tuple(sorted(set(columns[5])))
    return Records(
        logits=np.array(columns[0], np.float64),
        decided=np.array(columns[1]),
        accepted=np.array(columns[2]),
        temperature=np.array(columns[3], np.float64),
        regime=np.array(columns[4]),
        domain=np.array([domains.index(name) for name in columns[5]]),
        prompt=np.array(columns[6]),
        domains=domains,
    )


def _read_round(found: Any, where: str, draft_len: int) -> tuple[list[float], int, int]:
    """Logits, decided and accepted slots."""
    if not isinstance(found, dict):
        raise CheckpointError(f"{where}: a round is an {type(found).__name__}, expected an object")
    keys = Keys(found, where)
    logits, decided, accepted = keys.get("logits", list), keys.get("decided", int), keys.get("accepted", int)
    if len(logits) > draft_len:
        raise CheckpointError(f"{where}: {len(logits)} slots in a round, expected at most {draft_len}")
    if not 0 <= accepted <= decided <= len(logits):
        raise CheckpointError(f"{where}: accepted {accepted} of {decided} decided of {len(logits)} slots")
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in logits):
        raise CheckpointError(f"{where}: logits {logits!r}, expected numbers")
    return [float(value) for value in logits], decided, accepted
