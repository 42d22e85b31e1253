"""Cached hidden states are those of the target, whatever batch and file they came through; a bad cache is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_core.checkpoint.load import load_target
from dspark_core.errors import CheckpointError
from dspark_core.train.config import FeaturesConfig
from dspark_core.train.data import Example
from dspark_core.train.features import FeatureCache, States, TargetStates, cache_bytes, require_space, write_cache
from dspark_core.train.setup import cache_features
from dspark_core.train.source import open_cache
from tests.core.models.test_families import TOLERANCE, largest, save_random
from tests.server.engines import make_prompt, tiny_target
from tests.tiny import edit_json, edit_weights, tiny_target_folder

TAPS = (0, -1, 2)
LENGTHS = (5, 64, 3, 70, 31, 2)
EXAMPLES = [
    Example(f"p{n}-0", "math" if n % 2 else "code", f"p{n}", make_prompt(size, seed=n), [k > 1 for k in range(size)])
    for n, size in enumerate(LENGTHS)
]
FIRST = "features-00000.safetensors"
ORIGIN: dict[str, object] = {"target": "abc", "target_layer_ids": list(TAPS)}


def write(output: Path, examples: Sequence[Example] = EXAMPLES, **changes: Any) -> FeatureCache:
    """A cache of the tiny target's states; three files by default."""
    states = changes.pop("states", None) or TargetStates(tiny_target().model, TAPS)
    write_cache(output, examples, states, **{"origin": ORIGIN, "batch_tokens": 66, "shard_tokens": 80} | changes)
    return FeatureCache(output)


def equal(a: States, b: States) -> bool:
    return torch.equal(a.features, b.features) and torch.equal(a.last_hidden, b.last_hidden)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_states_of_a_sequence_do_not_depend_on_its_batch() -> None:
    """To the last bit, and on a pool of pages that other sequences have used."""
    together = TargetStates(tiny_target().model, TAPS)
    found = together([example.token_ids for example in EXAMPLES])
    again = together([example.token_ids for example in reversed(EXAMPLES)])
    for example, states, later in zip(EXAMPLES, found, reversed(again), strict=True):
        (alone,) = TargetStates(tiny_target().model, TAPS)([example.token_ids])
        assert states.features.shape == (len(example.token_ids), 3 * 32)
        assert equal(states, alone)
        assert equal(later, alone)


def test_a_sequence_that_overflows_spoils_no_other(tmp_path: Path) -> None:
    """A NaN left in a page's rest would reach whoever gets the page next: 0 * NaN is NaN."""
    weights = tiny_target_folder(tmp_path) / "model.safetensors"
    embedding = load_file(weights)["model.embed_tokens.weight"]
    embedding[200] = float("inf")
    edit_weights(weights, **{"model.embed_tokens.weight": embedding})
    (target := load_target(weights.parent)).prepare(max_positions=128)
    states = TargetStates(target, TAPS)
    assert not states([[200] * 40])[0].last_hidden.isfinite().all()
    assert equal(*states([[2, 3, 4]]), *TargetStates(target, TAPS)([[2, 3, 4]]))


def test_taps_are_numbered_as_layer_outputs_of_transformers(tmp_path: Path) -> None:
    """Layer L is hidden_states[L + 1]; their last entry is the output after the final norm."""
    theirs = save_random("qwen3", tmp_path)
    target = load_target(tmp_path)
    target.prepare(max_positions=128)
    ids = torch.randint(0, 83, (40,))
    with torch.no_grad():
        expected = theirs(ids.unsqueeze(0), output_hidden_states=True).hidden_states
    _, states = TargetStates(target, (1, -1, 0))([[3, 4, 5], ids.tolist()])
    assert largest(states.features, torch.cat([expected[layer + 1][0] for layer in (1, -1, 0)], -1)) < TOLERANCE
    assert largest(states.last_hidden, expected[-1][0]) < TOLERANCE


@pytest.mark.parametrize("batch_tokens", [1, 66, 10_000])
@pytest.mark.parametrize("shard_tokens", [1, 80, 10_000])
def test_a_cache_gives_back_what_the_target_computes(batch_tokens: int, shard_tokens: int, tmp_path: Path) -> None:
    cache = write(tmp_path, batch_tokens=batch_tokens, shard_tokens=shard_tokens)
    assert cache.examples == EXAMPLES
    assert cache.target_layer_ids == TAPS
    assert len(list(tmp_path.glob("*.safetensors"))) == {1: 6, 80: 3, 10_000: 1}[shard_tokens]
    for number in (4, 0, 5, 3, 2, 1):
        (alone,) = TargetStates(tiny_target().model, TAPS)([EXAMPLES[number].token_ids])
        # Taps are stored in bfloat16; the last hidden states, which logits are made of, as they are.
        assert equal(cache.states(number), States(alone.features.bfloat16(), alone.last_hidden))


def stopping_after(calls: int) -> Callable[[Sequence[Sequence[int]]], list[States]]:
    real, left = TargetStates(tiny_target().model, TAPS), iter(range(calls))

    def compute(sequences: Sequence[Sequence[int]]) -> list[States]:
        if next(left, None) is None:
            raise RuntimeError("stopped")
        return real(sequences)

    return compute


@pytest.mark.parametrize(("calls", "whole"), [(2, 0), (4, 2)])
def test_an_interrupted_cache_is_completed_to_the_same_bytes(calls: int, whole: int, tmp_path: Path) -> None:
    """The passes are of 1, 1, 1 sequences for the first file, one for the second and one for the third."""
    straight, output = contents(write(tmp_path / "straight").folder), tmp_path / "interrupted"
    with pytest.raises(RuntimeError, match="stopped"):
        write(output, states=stopping_after(calls))
    assert len(contents(output)) == 1 + whole
    assert contents(output).items() <= straight.items()
    missing = f"{3 - whole} of 3 files are missing, the first features-{whole:05d}"
    with pytest.raises(CheckpointError, match=f"interrupted is unfinished: {missing}"):
        FeatureCache(output)
    (output / ".features-00002.safetensors.tmp").write_bytes(b"what a kill left")
    write(output, states=stopping_after(5 - (0, 3, 4)[whole]))
    assert contents(output) == straight
    write(output, states=stopping_after(0))  # a finished one is not computed again


def first_with(**changes: Any) -> list[Example]:
    return [replace(EXAMPLES[0], **changes), *EXAMPLES[1:]]


@pytest.mark.parametrize(
    ("examples", "changes", "message"),
    [
        (EXAMPLES[:-1], {}, "data '[0-9a-f]{16}', now it is '[0-9a-f]{16}'"),
        (EXAMPLES[::-1], {}, "data "),
        (first_with(id="new"), {}, "data "),
        # The same prompts answered again: ids and lengths are those of EXAMPLES.
        (first_with(token_ids=[*EXAMPLES[0].token_ids[:-1], 99]), {}, "data "),
        (first_with(supervised=[True] * LENGTHS[0]), {}, "data "),
        (EXAMPLES, {"origin": ORIGIN | {"target": "xyz"}}, "target 'abc', now it is 'xyz'"),
        (EXAMPLES, {"origin": ORIGIN | {"target_layer_ids": [0, 1]}}, r"target_layer_ids \[0, -1, 2\], now it is \[0"),
        (EXAMPLES, {"shard_tokens": 200}, "shard_tokens 80, now it is 200"),
    ],
    ids=["fewer", "other order", "other id", "other tokens", "other mask", "other target", "other taps", "other files"],
)
def test_a_folder_that_holds_another_cache_is_refused(
    examples: list[Example], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=f"holds a cache with {message}") as caught:
        write(tmp_path, examples, **changes)
    assert str(tmp_path) in str(caught.value)
    assert contents(tmp_path) == before


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path).folder / "features-00001.safetensors"
    whole = path.read_bytes()
    for content in (b"", whole[:-1], whole[:100], b"\xff" * 8 + whole[8:]):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"features-00001\.safetensors is damaged, expected a whole"):
            FeatureCache(tmp_path)


@pytest.mark.parametrize("part", ["features", "last_hidden"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_states_that_are_not_finite_are_refused(part: str, value: float, tmp_path: Path) -> None:
    path = write(tmp_path).folder / FIRST
    tensors = load_file(path)
    tensors[f"p1-0/{part}"][7, 3] = value
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=rf"features-00000\.safetensors: p1-0/{part} holds NaN or infinity"):
        FeatureCache(tmp_path).states(1)


def test_rows_and_names_that_do_not_fit_the_index_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path).folder / FIRST
    tensors = load_file(path)
    save_file(tensors | {"p1-0/features": tensors["p1-0/features"][1:].clone()}, path)
    with pytest.raises(CheckpointError, match=r"features-00000\.safetensors: p1-0/features has 63 rows, expected 64"):
        FeatureCache(tmp_path).states(1)
    save_file(tensors | {"p1-0/supervised": tensors["p1-0/supervised"][1:].clone()}, path)
    with pytest.raises(CheckpointError, match=r"features-00000\.safetensors: p1-0 has "):
        FeatureCache(tmp_path)
    save_file({name: tensor for name, tensor in tensors.items() if name != "p1-0/last_hidden"}, path)
    with pytest.raises(CheckpointError, match=r"features-00000\.safetensors: p1-0/last_hidden cannot be read"):
        FeatureCache(tmp_path).states(1)


def test_an_index_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"features\.json does not exist"):
        FeatureCache(tmp_path)
    write(tmp_path)
    edit_json(tmp_path / "features.json", version=2)
    with pytest.raises(CheckpointError, match=r"features\.json: version is 2, expected 1"):
        FeatureCache(tmp_path)


def test_the_size_that_is_announced_is_the_size_it_gets(tmp_path: Path) -> None:
    """But for the headers of the files: 0.01 % with real hidden sizes."""
    files = [path.read_bytes() for path in write(tmp_path).folder.glob("*.safetensors")]
    headers = sum(8 + int.from_bytes(content[:8], "little") for content in files)
    assert sum(map(len, files)) - headers == cache_bytes(EXAMPLES, 32, len(TAPS), torch.float32)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    with pytest.raises(CheckpointError, match=r"yet needs 1048576\.0 GiB, and the disk has [\d.]+ GiB free"):
        require_space(folder, 2**50)
    require_space(folder, 1)
    assert not folder.parent.exists()


def features_config(tmp_path: Path, **changes: Any) -> FeaturesConfig:
    """Settings of the command, for a target and data that are made on first use."""
    target, data = tmp_path / "target", tmp_path / "data.jsonl"
    if not target.exists():
        tiny_target_folder(tmp_path)
        lines = [{"id": e.id, "prompt_ids": e.token_ids[:2], "response_ids": e.token_ids[2:]} for e in EXAMPLES]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {"target": str(target), "data": (str(data),), "output": str(tmp_path / "cache"), "max_length": 66}
    return FeaturesConfig(**given | {"target_layer_ids": TAPS} | changes)


def test_the_command_writes_a_cache_that_belongs_to_its_target(tmp_path: Path) -> None:
    folder = cache_features(features_config(tmp_path))
    cache = open_cache(folder, made_for := FeatureCache(folder).origin.get("target", str))
    assert [len(example.token_ids) for example in cache.examples] == [5, 64, 66, 31], "cut, and too short ones out"
    (alone,) = TargetStates(tiny_target().model, TAPS)([EXAMPLES[3].token_ids[:66]])
    assert equal(cache.states(2), States(alone.features.bfloat16(), alone.last_hidden))
    with pytest.raises(CheckpointError, match=f"cache: made with the target {made_for}, the run's is 0123"):
        open_cache(folder, "0123")
    other = tiny_target_folder(tmp_path, name="other", seed=3)
    with pytest.raises(CheckpointError, match=f"holds a cache with target '{made_for}', now it is "):
        cache_features(features_config(tmp_path, target=str(other)))


@pytest.mark.parametrize("taps", [(0, 4), (0, -2), (0, 0), (0, 3)])
def test_layers_that_no_draft_can_read_are_refused_before_hours_of_work(taps: tuple[int, ...], tmp_path: Path) -> None:
    message = rf"target_layer_ids is \[0, {taps[1]}\], expected different layer outputs from -1 to 2"
    with pytest.raises(CheckpointError, match=message):
        cache_features(features_config(tmp_path, target_layer_ids=taps))
    assert not (tmp_path / "cache").exists()
