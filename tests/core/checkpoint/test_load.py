"""Loading beyond single faults: dtypes that differ, shards in disorder, and what old exports carry along."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_core.checkpoint.load import load_draft, load_target
from dspark_core.checkpoint.weights import read_weights
from dspark_core.draft.drafter import DraftBlock, Drafter
from dspark_core.errors import CheckpointError
from tests.paged import flat_batch, greedy_ids, make_pool, slots_of
from tests.tiny import edit_json, edit_weights, tiny_draft_folder, tiny_target_folder

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def write_shards(folder: Path, count: int) -> list[Path]:
    """Deal the tensors out to `count` files, so that a layer's tensors lie in several."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    files = [folder / f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    weight_map = {name: files[i % count].name for i, name in enumerate(sorted(weights))}
    for file in files:
        save_file({name: weights[name] for name, where in weight_map.items() if where == file.name}, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return files


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
@pytest.mark.parametrize(("target_dtype", "draft_dtype"), [*itertools.product(DTYPES, DTYPES)])
def test_any_pair_of_dtypes_drafts(
    target_dtype: torch.dtype, draft_dtype: torch.dtype, head: str, tmp_path: Path
) -> None:
    """Case S1: features cross the border between target and draft; the first request must not fail."""
    folder = tiny_target_folder(tmp_path)
    target = load_target(folder, dtype=target_dtype)
    draft = load_draft(tiny_draft_folder(tmp_path, folder, head), target, dtype=draft_dtype)
    target.prepare(max_positions=32)
    draft.prepare(max_positions=32)
    taps = draft.config.target_layer_ids
    features = target(flat_batch([([5, 6, 7], 0, [0])]), make_pool(target, 1), tap=taps).features
    assert features is not None
    assert features.dtype == target_dtype
    drafter = Drafter(draft, make_pool(draft, 1))
    drafter.absorb(features, torch.arange(3), slots_of(range(3), [0]))
    drafts = drafter.draft([DraftBlock(8, 3, 4, [0])], lambda _slot, logits, _ids: logits.argmax(-1))
    assert draft.norm.weight.dtype == draft_dtype
    assert drafts.confidence_logits is not None
    assert drafts.confidence_logits.dtype == torch.float32
    assert drafts.confidence_logits.isfinite().all()


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_small_heads_may_be_stored_in_another_dtype(head: str, stored: torch.dtype, tmp_path: Path) -> None:
    """Case R14."""
    folder = tiny_target_folder(tmp_path)
    draft_folder = tiny_draft_folder(tmp_path, folder, head)
    path = draft_folder / WEIGHTS
    small = {n: w.to(stored) for n, w in load_file(path).items() if "_head." in n and "lm_head" not in n}
    edit_weights(path, **small)
    draft = load_draft(draft_folder, load_target(folder))
    assert {p.dtype for p in draft.parameters()} == {torch.float32}
    for name, tensor in small.items():
        assert torch.equal(draft.get_parameter(name), tensor.float())


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    edit_weights(folder / WEIGHTS, **{"model.norm.weight": torch.ones(32, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=r"norm\.weight has dtype torch.int8, expected a floating-point type"):
        load_target(folder)


def test_sharded_models_compute_the_same(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    texts = []
    for shards in (0, 3):
        if shards:
            write_shards(folder, shards)
        model = load_target(folder)
        model.prepare(max_positions=64)
        texts.append(greedy_ids(model, [5, 6, 7], 20))
    assert texts[0] == texts[1]


def test_every_missing_shard_is_named(tmp_path: Path) -> None:
    """Case R10: a stale index."""
    folder = tiny_target_folder(tmp_path)
    files = write_shards(folder, 4)
    files[1].unlink()
    files[3].unlink()
    with pytest.raises(CheckpointError) as caught:
        load_target(folder)
    assert all((file.name in str(caught.value)) == (not file.exists()) for file in files)


def test_one_truncated_shard_is_named(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    files = write_shards(folder, 3)
    data = files[1].read_bytes()
    files[1].write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="truncated") as caught:
        load_target(folder)
    assert files[1].name in str(caught.value)


def test_the_index_decides_which_files_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Case R13: an older single file beside the shards, with the same names and other shapes."""
    folder = tiny_target_folder(tmp_path)
    expected = load_file(folder / WEIGHTS)
    write_shards(folder, 2)
    save_file({name: torch.zeros(1) for name in expected}, folder / WEIGHTS)
    found = read_weights(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert f"ignoring {WEIGHTS}" in caplog.text


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"model.norm.weight": 3}}',
        '{"weight_map": {"model.norm.weight": "../other/model.safetensors"}}',
    ],
)
def test_a_broken_index_is_named(index: str, tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    (folder / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load_target(folder)


def test_a_folder_in_place_of_the_weights_is_named(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    with pytest.raises(CheckpointError, match=WEIGHTS):
        load_target(folder)


def test_rotary_tables_of_old_exports_are_ignored(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path, "llama")
    edit_weights(folder / WEIGHTS, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load_target(folder)


def test_a_tied_model_shares_one_matrix(tmp_path: Path) -> None:
    """Case R5: tied with the head left out, and with an equal copy stored; a flag that is false needs its head."""
    folder = tiny_target_folder(tmp_path, tie_word_embeddings=True)
    model = load_target(folder)
    assert model.lm_head.weight is model.embed_tokens.weight
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    edit_weights(folder / WEIGHTS, **{"lm_head.weight": embedding.clone()})
    assert load_target(folder).lm_head.weight is not None
    edit_weights(folder / WEIGHTS, **{"lm_head.weight": embedding[:-1].clone()})
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load_target(folder)
    edit_weights(folder / WEIGHTS, **{"lm_head.weight": None})
    edit_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"missing lm_head\.weight"):
        load_target(folder)


@pytest.mark.parametrize(
    "name", ["markov_head.markov_w1.weight", "fc.weight", "hidden_norm.weight", "confidence_head.proj.bias"]
)
def test_nothing_of_a_draft_stays_at_random_values(name: str, tmp_path: Path) -> None:
    """Case R4."""
    folder = tiny_target_folder(tmp_path)
    draft_folder = tiny_draft_folder(tmp_path, folder)
    edit_weights(draft_folder / WEIGHTS, **{name: None})
    with pytest.raises(CheckpointError, match=f"missing {name}"):
        load_draft(draft_folder, load_target(folder))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"markov_rank": 5}, r"markov_head\.markov_w1\.weight has shape \[259, 6\], expected \[259, 5\]"),
        ({"markov_head_type": "gated"}, r"missing markov_head\.gate_proj"),
        ({"markov_head_type": "rnn"}, r"missing markov_head\.joint_proj"),
        ({"markov_rank": 0, "confidence_head_with_markov": False}, r"unexpected markov_head\.markov_w1"),
        ({"enable_confidence_head": False}, r"unexpected confidence_head\.proj"),
        ({"num_hidden_layers": 1}, r"unexpected layers\.1"),
        ({"target_layer_ids": [0]}, r"fc\.weight has shape \[32, 64\], expected \[32, 32\]"),
    ],
)
def test_a_config_that_tells_of_other_weights_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    draft_folder = tiny_draft_folder(tmp_path, folder)
    edit_json(draft_folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=named):
        load_draft(draft_folder, load_target(folder))


def test_a_shorter_block_may_be_asked_for(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    draft = load_draft(tiny_draft_folder(tmp_path, folder, draft_len=4), load_target(folder), draft_len=2)
    assert draft.config.draft_len == 2


def test_the_target_lends_its_own_weights_in_the_drafts_dtype(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path, tie_word_embeddings=True)
    target = load_target(folder)
    draft = load_draft(tiny_draft_folder(tmp_path, folder, borrow=True), target, dtype=torch.bfloat16)
    assert torch.equal(draft.embed_tokens.weight, target.embed_tokens.weight.bfloat16())
    assert torch.equal(draft.get_parameter("lm_head.weight"), target.embed_tokens.weight.bfloat16())
