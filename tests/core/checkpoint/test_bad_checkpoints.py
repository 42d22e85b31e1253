"""A checkpoint that cannot be used is refused with the file, what was found and what was expected."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark_core.checkpoint.load import load_draft, load_target, shares_head
from dspark_core.checkpoint.weights import read_weights
from dspark_core.errors import CheckpointError
from tests.tiny import tiny_draft_folder, tiny_target_folder

WEIGHTS = "model.safetensors"


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


def shard(folder: Path) -> list[str]:
    """Split the weights in two shards with an index."""
    weights = load_file(folder / WEIGHTS)
    names = sorted(weights)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    halves = [names[: len(names) // 2], names[len(names) // 2 :]]
    for file, half in zip(files, halves, strict=True):
        save_file({name: weights[name] for name in half}, folder / file)
    weight_map = {name: file for file, half in zip(files, halves, strict=True) for name in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / WEIGHTS).unlink()
    return files


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    whole = load_file(folder / WEIGHTS)
    shard(folder)
    sharded = read_weights(folder)
    assert sharded.keys() == whole.keys()
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    files = shard(folder)
    (folder / files[1]).unlink()
    with pytest.raises(CheckpointError, match=files[1]):
        load_target(folder)


def test_an_index_that_names_absent_tensors_is_refused(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    files = shard(folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.9.extra"] = files[0]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"layers\.9\.extra"):
        load_target(folder)


def test_stray_files_are_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_target_folder(tmp_path)
    save_file({"model.norm.weight": torch.zeros(3)}, folder / "stray.safetensors")
    with caplog.at_level(logging.WARNING):
        load_target(folder)
    assert "stray.safetensors" in caplog.text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "Git LFS pointer"),
        (b"abcd", "4 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", "not a whole safetensors file"),
        (b"", "0 bytes"),
    ],
)
def test_files_that_hold_no_weights_are_named_with_the_likely_cause(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    """Case R12."""
    folder = tiny_target_folder(tmp_path)
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(CheckpointError, match=expected) as error:
        load_target(folder)
    assert str(folder / WEIGHTS) in str(error.value)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="truncated"):
        load_target(folder)


def test_no_weights_at_all(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=WEIGHTS):
        load_target(folder)


def test_missing_extra_and_misshaped_tensors_are_all_listed(tmp_path: Path) -> None:
    target = tiny_target_folder(tmp_path)
    draft = tiny_draft_folder(tmp_path, target)

    def damage(weights: dict[str, Tensor]) -> None:
        del weights["layers.1.self_attn.k_norm.weight"]
        weights["layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
        weights["norm.weight"] = torch.zeros(5)

    change_weights(draft, damage)
    with pytest.raises(CheckpointError) as error:
        load_draft(draft, load_target(target))
    message = str(error.value)
    assert "missing layers.1.self_attn.k_norm.weight" in message
    assert "unexpected layers.7.mlp.up_proj.weight" in message
    assert "norm.weight has shape [5], expected [32]" in message


@pytest.mark.parametrize(("with_markov", "width"), [(True, 38), (False, 32)])
def test_a_confidence_head_of_the_wrong_width_is_refused(tmp_path: Path, with_markov: bool, width: int) -> None:
    target = tiny_target_folder(tmp_path)
    draft = tiny_draft_folder(tmp_path, target, confidence_head_with_markov=with_markov)
    change_config(draft, confidence_head_with_markov=not with_markov)
    with pytest.raises(CheckpointError, match=rf"confidence_head\.proj\.weight has shape \[1, {width}\]"):
        load_draft(draft, load_target(target))


def test_a_checkpoint_without_its_confidence_head_is_refused(tmp_path: Path) -> None:
    """Case R15."""
    target = tiny_target_folder(tmp_path)
    draft = tiny_draft_folder(tmp_path, target)
    change_weights(draft, lambda weights: weights.pop("confidence_head.proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing confidence_head\.proj\.weight"):
        load_draft(draft, load_target(target))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"vocab_size": 200}, "vocab_size is 259, the target has 200"),
        ({"hidden_size": 48}, "hidden_size is 32, the target has 48"),
        ({"num_hidden_layers": 5}, "num_target_layers is 4, the target has 5"),
    ],
)
def test_a_draft_of_other_sizes_belongs_to_another_target(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    """Case R1."""
    draft = tiny_draft_folder(tmp_path, tiny_target_folder(tmp_path))
    other = tiny_target_folder(tmp_path, name="other", **changes)
    with pytest.raises(CheckpointError, match=f"another target.*{expected}"):
        load_draft(draft, load_target(other))


def test_a_draft_of_the_same_sizes_is_known_by_its_embedding(tmp_path: Path) -> None:
    """Case R1."""
    draft = tiny_draft_folder(tmp_path, tiny_target_folder(tmp_path))
    other = load_target(tiny_target_folder(tmp_path, name="other", seed=99))
    with pytest.raises(CheckpointError, match=r"another target.*does not resemble"):
        load_draft(draft, other)


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_are_borrowed_when_absent(tmp_path: Path, tied: bool) -> None:
    """Case R4."""
    folder = tiny_target_folder(tmp_path, tie_word_embeddings=tied)
    target = load_target(folder)
    draft = load_draft(tiny_draft_folder(tmp_path, folder, borrow=True), target)
    assert draft.embed_tokens.weight.data_ptr() == target.embed_tokens.weight.data_ptr()
    assert shares_head(draft, target)


def test_copies_of_the_targets_weights_are_shared_even_when_rounded(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    draft_folder = tiny_draft_folder(tmp_path, folder)
    change_weights(draft_folder, lambda w: w.update({k: v.bfloat16() for k, v in w.items()}))
    target = load_target(folder)
    draft = load_draft(draft_folder, target)
    assert shares_head(draft, target)
    assert draft.norm.weight.dtype == torch.float32


def test_a_head_of_its_own_is_kept(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    draft_folder = tiny_draft_folder(tmp_path, folder)
    change_weights(draft_folder, lambda w: w["lm_head.weight"].add_(0.5))
    target = load_target(folder)
    assert not shares_head(load_draft(draft_folder, target), target)


def test_a_tied_target_whose_stored_head_differs_is_refused(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path, tie_word_embeddings=True)
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    change_weights(folder, lambda w: w.update({"lm_head.weight": embedding.clone()}))
    load_target(folder)
    change_weights(folder, lambda w: w.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load_target(folder)


def test_an_untied_target_without_head_is_refused(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    change_weights(folder, lambda w: w.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing lm_head\.weight"):
        load_target(folder)


@pytest.mark.parametrize("asked", [0, 5])
def test_a_longer_block_than_trained_is_refused(tmp_path: Path, asked: int) -> None:
    """Case I9."""
    folder = tiny_target_folder(tmp_path)
    draft = tiny_draft_folder(tmp_path, folder, draft_len=4)
    with pytest.raises(CheckpointError, match=f"draft_len is {asked}, expected 1 to 4"):
        load_draft(draft, load_target(folder), draft_len=asked)
