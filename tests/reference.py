"""Checks golden folders, whose values the published reference implementation computed.

`python -m tests.reference FOLDER...` prints one line per quantity with its largest deviation and tolerance, and exits
with 1 if any is too large or a folder cannot be used. The form of a folder: target/, draft/, train.safetensors and
expected.json, of the `qwen3-*` kind, of any size.

Three parts: the training forward, the losses and their gradients (`tests.reference_training`); the same blocks through
the serving path, teacher forced; and greedy speculative decoding by the real engine, round by round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dspark_core.draft.backbone import DraftModel
from dspark_core.draft.drafter import Choose, DraftBlock, Drafter, Drafts
from dspark_core.models.decoder import TargetModel
from dspark_core.sampling import SamplingParams
from server.engine import Engine, EngineParts
from server.request import Request, RequestParams
from tests.golden import EXACT, BadFolderError, Check, Golden, compare
from tests.paged import PAGE_SIZE, flat_batch, make_pool, slots_of
from tests.reference_training import check_losses, check_training


def check_folder(folder: Path) -> Iterator[Check]:
    """All checks of one folder. Raises BadFolderError, CheckpointError and what damaged files raise."""
    golden = Golden.read(folder)
    target, draft = golden.load()
    yield from check_settings(golden, draft)
    yield from check_training(golden, draft)
    yield from check_losses(golden, draft)
    rollout = len(golden.expected["rollout"]["prompt"]) + rollout_limit(golden)
    length = max(golden.train["input_ids"].shape[1] + draft.config.draft_len, rollout)
    target.prepare(max_positions=length)
    draft.prepare(max_positions=length)
    yield from check_target(golden, target)
    yield from check_serving_blocks(golden, draft)
    yield from check_rollout(golden, target, draft)


def check_settings(golden: Golden, draft: DraftModel) -> Iterator[Check]:
    """What expected.json says of the draft is what its config was read as."""
    config, expected = draft.config, golden.expected
    if config.head_name != expected["head"]:
        raise BadFolderError(
            f"expected.json: head is {expected['head']!r}, draft/config.json says {config.head_name!r}"
        )
    yield compare("block_size", config.draft_len, expected["block_size"], EXACT)
    yield compare("mask_token_id", config.mask_token_id, expected["mask_token_id"], EXACT)
    yield compare("target_layer_ids", list(config.target_layer_ids), expected["target_layer_ids"], EXACT)


def check_target(golden: Golden, target: TargetModel) -> Iterator[Check]:
    """All sequences in one flat batch, their pages interleaved."""
    ids = golden.train["input_ids"]
    count, length = ids.shape
    per_sequence = -(-length // PAGE_SIZE)
    pages = [[j * count + i for j in range(per_sequence)] for i in range(count)]
    batch = flat_batch([(ids[i].tolist(), 0, pages[i]) for i in range(count)])
    taps = (*golden.expected["target_layer_ids"], target.config.num_layers - 1)
    output = target(batch, make_pool(target, count * per_sequence), tap=taps)
    assert output.features is not None
    size = target.config.hidden_size
    features = output.features[:, :-size].view(count, length, -1)
    last_hidden = target.norm(output.features[:, -size:]).view(count, length, -1)
    yield compare("target_logits", output.logits.view(count, length, -1), golden.train["target_logits"])
    yield compare("target_features", features, golden.train["target_features"])
    yield compare("target_last_hidden", last_hidden, golden.train["target_last_hidden"])


class Forced:
    """Stands for sampling: records the logits [K, V] of one block, and chooses the given previous tokens."""

    def __init__(self, previous_ids: Sequence[int]) -> None:
        self.previous_ids, self.logits = previous_ids, list[Tensor]()

    def __call__(self, slot: int, logits: Tensor, draft_ids: Tensor) -> Tensor:
        self.logits.append(logits[0])
        following = self.previous_ids[slot + 1 : slot + 2] or self.previous_ids[-1:]  # the last choice is not read
        return torch.tensor(following)


def check_serving_blocks(golden: Golden, draft: DraftModel) -> Iterator[Check]:
    """The training blocks again, through the serving path with the same previous tokens: the same outputs."""
    train, draft_len = golden.train, draft.config.draft_len
    windows = golden.windows(draft_len)
    pages = list(range(-(-int(windows.positions.max() + 1) // PAGE_SIZE)))
    drafter = Drafter(draft, make_pool(draft, len(pages)))
    logits, confidence = [], []
    for row, column in golden.keep.nonzero().tolist():
        anchor, forced = int(golden.anchors[row, column]), windows.previous_ids[row, column].tolist()
        if anchor:
            features, slots = train["target_features"][row, :anchor], slots_of(range(anchor), pages)
            drafter.absorb(features, torch.arange(anchor), slots)
        choose = Forced(forced)
        drafts = drafter.draft([DraftBlock(forced[0], anchor, draft_len, pages)], choose)
        logits.append(torch.stack(choose.logits))
        confidence.append(drafts.confidence_logits)
    yield compare("serving draft_logits", torch.stack(logits), train["draft_logits"][golden.keep])
    if draft.confidence_head is not None:
        expected = train["confidence_logits"][golden.keep]
        yield compare("serving confidence_logits", torch.cat([c for c in confidence if c is not None]), expected)


class NoText:
    """Stands in for a tokenizer: golden folders have none, and only ids are compared."""

    def detokenizer(self) -> NoText:
        return self

    def step(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class RecordingDrafter(Drafter):
    """Keeps what it drafted last."""

    last: Drafts | None = None

    def draft(self, blocks: Sequence[DraftBlock], choose: Choose) -> Drafts:
        self.last = super().draft(blocks, choose)
        return self.last


def rollout_limit(golden: Golden) -> int:
    """Tokens to ask for so that no block of the rollout is cut short: a first one, every round's, one block more."""
    rounds, draft_len = golden.expected["rollout"]["rounds"], int(golden.expected["block_size"])
    return 1 + (len(rounds) + 1) * (draft_len + 1)


def check_rollout(golden: Golden, target: TargetModel, draft: DraftModel) -> Iterator[Check]:
    """Greedy speculative decoding by the engine, round by round, and plain decoding beside it."""
    expected = golden.expected["rollout"]
    prompt, rounds, limit = expected["prompt"], expected["rounds"], rollout_limit(golden)
    num_pages = -(-(len(prompt) + limit) // PAGE_SIZE)
    drafter = RecordingDrafter(draft, make_pool(draft, num_pages))
    engine = Engine(
        EngineParts(
            target=target,
            pool=make_pool(target, num_pages),
            drafter=drafter,
            tokenizer=cast(Any, NoText()),
            eos_token_ids=frozenset(),
            vocab_size=target.config.vocab_size,
            max_model_len=len(prompt) + limit,
        )
    )
    found, output_ids = run_rounds(engine, drafter, prompt, len(rounds), limit)
    for name in ("verify_input_ids", "accepted", "next_token"):
        yield compare(f"rollout {name}", flat(found, name), flat(rounds, name), EXACT)
    if draft.confidence_head is not None:
        yield compare("rollout confidence_logits", flat(found, "confidence_logits"), flat(rounds, "confidence_logits"))
    size = len(expected["output_ids"])
    yield compare("rollout output_ids", output_ids[:size], expected["output_ids"], EXACT)
    greedy = expected["greedy_autoregressive_ids"]
    plain = RequestParams(SamplingParams(temperature=0.0), max_tokens=len(greedy) - len(prompt), speculative=False)
    request = add(engine, prompt, plain)
    while engine.has_work:
        engine.step()
    yield compare("greedy_autoregressive_ids", request.tokens, greedy, EXACT)


def add(engine: Engine, prompt: list[int], params: RequestParams) -> Request:
    request = engine.make_request(prompt, params)
    engine.add(request)
    return request


def run_rounds(
    engine: Engine, drafter: RecordingDrafter, prompt: list[int], count: int, limit: int
) -> tuple[list[dict[str, Any]], list[int]]:
    """`count` rounds in the form of expected.json, and prompt and output after them."""
    request = add(engine, prompt, RequestParams(SamplingParams(temperature=0.0), max_tokens=limit))
    rounds: list[dict[str, Any]] = []
    while len(rounds) < count or not request.num_generated:
        before, drafter.last = len(request.tokens), None
        engine.step()
        if drafter.last is None:
            continue  # prefill
        confidence = drafter.last.confidence_logits
        rounds.append(
            {
                "verify_input_ids": [request.tokens[before - 1], *drafter.last.draft_ids[0].tolist()],
                "confidence_logits": [] if confidence is None else confidence[0].tolist(),
                "accepted": len(request.tokens) - before - 1,
                "next_token": request.tokens[-1],
            }
        )
    engine.abort(request)
    return rounds, request.tokens


def flat(rounds: Sequence[dict[str, Any]], name: str) -> list[float]:
    """One field of all rounds, lists joined."""
    values = [entry[name] for entry in rounds]
    return [x for value in values for x in (value if isinstance(value, list) else [value])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the folders of the command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.reference", description="Check golden folders.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    bad = [folder for folder in parser.parse_args(arguments).folders if not report(folder)]
    return int(bool(bad))


def report(folder: Path) -> bool:
    """Print the checks of one folder; whether all hold."""
    print(folder)
    good = True
    try:
        for check in check_folder(folder):
            print(f"  {check}")
            good &= check.ok
    except Exception as error:  # damaged folders fail in many ways; each is said and counts as a mismatch
        print(f"  MISMATCH {folder} cannot be checked: {type(error).__name__}: {error}")
        return False
    return good


if __name__ == "__main__":
    sys.exit(main())
