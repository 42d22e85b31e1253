"""What a step sees is a function of the seed and the step: order, windows, vocabulary and rows of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark_core.train.batches import (
    VALIDATION_STRIDE,
    Order,
    Rows,
    VocabSample,
    choose_anchors,
    make_rows,
    validation_anchors,
)
from dspark_core.train.config import FitConfig
from dspark_core.train.data import Example
from dspark_core.train.features import States

TAPPED, HIDDEN = 6, 3


def example(name: str, size: int, prompt: int = 2) -> Example:
    """Token ids count up from a hundred of their own, so that they tell where they came from."""
    first = 100 * (ord(name) - ord("a") + 1)
    return Example(f"{name}-0", "all", name, list(range(first, first + size)), [k >= prompt for k in range(size)])


def states_of(sequence: Example, dtype: torch.dtype = torch.float32) -> States:
    """Every row holds the token it belongs to."""
    ids = torch.tensor(sequence.token_ids).unsqueeze(-1)
    return States(ids.expand(-1, TAPPED).to(torch.bfloat16), ids.expand(-1, HIDDEN).to(dtype))


def config(**changes: Any) -> FitConfig:
    return FitConfig(**{"data": ("d",), "output": "o", "draft_len": 4, "num_anchors": 5} | changes)


@pytest.mark.parametrize("group", [1, 3, 7, 8, 20])
def test_every_epoch_takes_every_sequence_once(group: int) -> None:
    """Whatever the steps' size: a step may hold the end of one epoch and the start of the next."""
    order = Order(7, group, seed=0)
    taken = [place for step in range(21) for place in order.of_step(step)]
    assert len(taken) == 21 * group
    for epoch in range(3 * group):
        assert [e for _, e in taken[7 * epoch : 7 * epoch + 7]] == [epoch] * 7
        assert sorted(i for i, _ in taken[7 * epoch : 7 * epoch + 7]) == list(range(7))


def test_epochs_and_seeds_are_mixed_in_other_ways() -> None:
    orders = [Order(20, 20, seed) for seed in (0, 1)]
    mixed = {tuple(i for i, _ in order.of_step(step)) for order in orders for step in range(3)}
    assert len(mixed) == 6


def test_the_order_is_the_same_from_whatever_step_it_is_asked() -> None:
    """So a resumed run neither repeats nor leaves out a sequence (case W12)."""
    straight = [Order(7, 3, seed=5).of_step(step) for step in range(12)]
    order = Order(7, 3, seed=5)
    assert [order.of_step(step) for step in range(12)] == straight
    for start in (1, 2, 7, 11):
        resumed = Order(7, 3, seed=5)
        assert [resumed.of_step(step) for step in range(start, 12)] == straight[start:]
    assert order.of_step(0) == straight[0], "going back works too"


def test_a_vocabulary_holds_every_label_and_is_as_large_as_asked() -> None:
    labels = torch.tensor([0, 3, 17, 49])
    sample = VocabSample(labels, 50, 12, seed=0)
    found = [sample.of_step(step) for step in range(4)]
    for ids in found:
        assert len(ids) == 12
        assert (ids.diff() > 0).all(), "ascending, none twice"
        assert torch.isin(labels, ids).all()
        assert 0 <= ids[0] <= ids[-1] < 50
    assert len({tuple(ids.tolist()) for ids in found}) == 4, "other ids in every step"
    assert torch.equal(VocabSample(labels, 50, 12, seed=0).of_step(2), found[2]), "the same after a resumption"
    assert not torch.equal(VocabSample(labels, 50, 12, seed=1).of_step(2), found[2])


def test_every_other_id_gets_its_turn() -> None:
    sample = VocabSample(torch.tensor([4]), 10, 3, seed=0)
    assert torch.cat([sample.of_step(step) for step in range(40)]).unique().tolist() == list(range(10))


@pytest.mark.parametrize(("size", "expected"), [(2, 4), (4, 4), (50, 50), (99, 50)])
def test_a_vocabulary_is_neither_too_small_for_the_labels_nor_larger_than_all(size: int, expected: int) -> None:
    ids = VocabSample(torch.tensor([0, 3, 17, 49]), 50, size, seed=0).of_step(0)
    assert len(ids) == expected
    assert len(ids.unique()) == expected


def test_windows_are_others_in_every_epoch_and_the_same_with_the_same_seed() -> None:
    sequence = example("a", 60)
    chosen = [choose_anchors(sequence, epoch, config()) for epoch in range(3)]
    assert len({tuple(anchors.tolist()) for anchors in chosen}) == 3
    assert torch.equal(choose_anchors(sequence, 1, config()), chosen[1])
    assert not torch.equal(choose_anchors(sequence, 1, config(seed=1)), chosen[1])
    assert not torch.equal(choose_anchors(example("b", 60), 1, config()), chosen[1]), "sequences differ, too"
    for anchors in chosen:
        assert len(anchors) == 5
        assert (anchors.diff() > 0).all()
        assert all(sequence.supervised[p] and sequence.supervised[p + 1] for p in anchors.tolist())


def test_arms_of_a_comparison_see_the_same_windows() -> None:
    """What an arm changes (losses, heads, learning rate) has no part in where the windows lie."""
    other = config(ce_weight=1.0, markov_head_type="rnn", lr=1.0, loss_decay=2.0)
    assert torch.equal(choose_anchors(example("a", 60), 2, other), choose_anchors(example("a", 60), 2, config()))


def test_strides_and_validation_place_the_same_windows_always() -> None:
    sequence = example("a", 60)
    strided = [choose_anchors(sequence, epoch, config(anchor_stride=10, seed=epoch)) for epoch in range(2)]
    assert [anchors.tolist() for anchors in strided] == [[10, 20, 30, 40]] * 2, "0 is in the prompt"
    assert validation_anchors(sequence, 4).tolist() == list(range(VALIDATION_STRIDE, 48, VALIDATION_STRIDE))


def rows_of(names: str, sizes: list[int], anchors: list[list[int]], row_tokens: int | None) -> Rows:
    examples = [example(name, size) for name, size in zip(names, sizes, strict=True)]
    rows = make_rows(examples, [torch.tensor(anchor, dtype=torch.int64) for anchor in anchors], row_tokens)
    check_rows(rows, examples)
    return rows


def check_rows(rows: Rows, examples: list[Example]) -> None:
    """What is no token is nothing at all, and states lie beside their tokens."""
    assert not rows.loss_mask[rows.input_ids == 0].any()
    assert not rows.anchors[~rows.keep].any()
    assert rows.names == [e.id for e in examples]
    for (row, start), sequence in zip(rows.places, examples, strict=True):
        assert rows.input_ids[row, start : start + len(sequence.token_ids)].tolist() == sequence.token_ids
    batch = rows.with_states([states_of(e) for e in examples], torch.device("cpu"))
    ids = rows.input_ids.unsqueeze(-1)
    assert torch.equal(batch.features, ids.expand(-1, -1, TAPPED).to(torch.bfloat16))
    assert torch.equal(batch.last_hidden, ids.expand(-1, -1, HIDDEN).float())


def test_one_sequence_a_row_is_padded_at_the_end() -> None:
    rows = rows_of("ab", [5, 3], [[2, 3], [2]], None)
    assert rows.input_ids.tolist() == [[100, 101, 102, 103, 104], [200, 201, 202, 0, 0]]
    assert rows.loss_mask.tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0]]
    assert rows.sequence_starts.tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 3, 4]]
    assert rows.anchors.tolist() == [[2, 3], [2, 0]]
    assert rows.keep.tolist() == [[True, True], [True, False]]
    assert rows.places == [(0, 0), (1, 0)]


def test_sequences_share_a_row_as_long_as_there_is_room() -> None:
    rows = rows_of("abcd", [5, 3, 4, 2], [[2, 3], [], [2], [0]], 9)
    assert rows.input_ids.tolist() == [
        [100, 101, 102, 103, 104, 200, 201, 202],
        [300, 301, 302, 303, 400, 401, 0, 0],
    ]
    assert rows.sequence_starts.tolist() == [[0, 0, 0, 0, 0, 5, 5, 5], [0, 0, 0, 0, 4, 4, 6, 7]]
    assert rows.anchors.tolist() == [[2, 3], [2, 4]]
    assert rows.keep.all()
    assert rows.places == [(0, 0), (0, 5), (1, 0), (1, 4)]


def test_a_row_that_is_exactly_full_takes_no_more() -> None:
    assert rows_of("abc", [5, 4, 1], [[], [], []], 9).input_ids.shape == (2, 9)


def test_sequences_without_windows_have_one_that_is_not_kept() -> None:
    rows = rows_of("a", [5], [[]], None)
    assert (rows.anchors.tolist(), rows.keep.tolist()) == ([[0]], [[False]])


def supervised_labels(rows: Rows) -> list[int]:
    windows = rows.windows(4)
    labels: Tensor = windows.target_ids[windows.eval_mask]
    return sorted(labels.tolist())


def test_windows_of_rows_supervise_what_follows_their_anchors() -> None:
    """Up to the end of the sequence, and nothing in the window that is not kept."""
    assert supervised_labels(rows_of("ab", [9, 4], [[2, 6], [2]], None)) == [103, 104, 105, 106, 107, 108, 203]


@pytest.mark.parametrize("row_tokens", [21, 64])
def test_rows_of_several_sequences_supervise_what_each_alone_does(row_tokens: int) -> None:
    sizes, anchors = [16, 9, 12, 7], [[3, 9, 14], [4, 7], [2, 3], [5]]
    packed = rows_of("abcd", sizes, anchors, row_tokens)
    alone = [rows_of(name, [size], [a], None) for name, size, a in zip("abcd", sizes, anchors, strict=True)]
    assert len(packed.input_ids) < 4
    assert supervised_labels(packed) == sorted(label for rows in alone for label in supervised_labels(rows))


def test_a_batch_is_on_the_device_and_keeps_its_names() -> None:
    sequences = [example("a", 5), example("b", 3)]
    rows = rows_of("ab", [5, 3], [[2], [2]], None)
    batch = rows.with_states([states_of(e, torch.float16) for e in sequences], torch.device("meta"))
    tensors = [v for v in (*vars(batch.rows).values(), batch.features, batch.last_hidden) if isinstance(v, Tensor)]
    assert len(tensors) == 7
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert (batch.features.dtype, batch.last_hidden.dtype) == (torch.bfloat16, torch.float16), "as the states have it"
    assert (batch.rows.names, batch.rows.places) == (rows.names, rows.places)
    assert rows.input_ids.device.type == "cpu", "the rows stay as they were"


def test_fewer_states_than_sequences_are_refused() -> None:
    rows = rows_of("ab", [5, 3], [[2], [2]], None)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        rows.with_states([states_of(example("a", 5))], torch.device("cpu"))
