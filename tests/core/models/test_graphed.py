"""The CUDA runner: padding, static memory and what a graph repeats. Interpreted here; on a GPU for real."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dspark_core.checkpoint.load import load_target
from dspark_core.models import runner
from dspark_core.models.decoder import TargetModel
from dspark_core.models.eager import EagerLayers
from dspark_core.models.graphed import GRAPH_ROWS, GraphedLayers, Replay
from tests.paged import flat_batch, make_pool
from tests.tiny import tiny_target_folder

STEPS = 16
Part = tuple[list[int], int, list[int]]


def record_by_repeating(step: Callable[[], tuple[Tensor, Tensor | None]]) -> tuple[Replay, Tensor, Tensor | None]:
    """What a graph does, without one: the same step again, from and to the same memory."""
    hidden, features = (None if part is None else part.clone() for part in step())
    assert hidden is not None

    def replay() -> None:
        for place, value in zip((hidden, features), step(), strict=True):
            if place is not None:
                place.copy_(value)

    return replay, hidden.fill_(torch.nan), features


def load(folder: Path, monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> TargetModel:
    monkeypatch.setattr(runner, "can_pack", lambda device, dtype: False)
    model = load_target(folder, device=device)
    model.prepare(max_positions=400)
    return model


def parts_of(source: random.Random, done: list[int], tables: list[list[int]], ids: list[list[int]]) -> list[Part]:
    """A random step of some requests."""
    counts = [source.choice((0, 1, 1, 1, 5, 20)) for _ in done]
    parts = [
        (own[at : at + count], at, table)
        for own, at, count, table in zip(ids, done, counts, tables, strict=True)
        if count and at + count <= len(own)
    ]
    for number, count in enumerate(counts):
        done[number] += count if done[number] + count <= len(ids[number]) else 0
    return parts


def compare(model: TargetModel, graphed: GraphedLayers, steps: int) -> None:
    """Both runners over the same random steps, each with a pool of its own."""
    eager, source = model.runner, random.Random(0)
    tables = [[12, 3, 7, 1, 9, 4, 0], [2, 5, 6, 8, 10, 11, 13], list(range(14, 21)), list(range(21, 28))]
    ids = [[source.randrange(259) for _ in range(100)] for _ in tables]
    pools, done = [make_pool(model, 28) for _ in range(2)], [0] * 4
    for step in range(steps):
        parts, tap = parts_of(source, done, tables, ids), (-1, 1) if step % 4 == 0 else ()
        if not parts:
            continue
        outputs = []
        for layers, pool in zip((eager, graphed), pools, strict=True):
            model.runner = layers
            output = model(to(flat_batch(parts), model.device), pool, tap=tap)
            outputs.append((output.logits.clone(), None if output.features is None else output.features.clone()))
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    for memory in ("keys", "values"):
        torch.testing.assert_close(getattr(pools[0], memory), getattr(pools[1], memory), rtol=1e-4, atol=1e-4)
    model.runner = eager


def to(batch, device):  # type: ignore[no-untyped-def]
    return type(batch)(*(x.to(device) for x in (batch.token_ids, batch.positions, batch.slots)), batch.segments)


def test_padded_steps_equal_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tiny_target_folder(tmp_path, num_hidden_layers=2), monkeypatch)
    assert isinstance(model.runner, EagerLayers)
    graphed = GraphedLayers(model.runner, record_by_repeating)
    compare(model, graphed, STEPS)
    sizes = {key[0] for key in graphed._graphs}
    assert len(sizes) > 3
    assert sizes <= set(GRAPH_ROWS)
    assert len(graphed._graphs) < STEPS, "graphs are used again"


def test_large_steps_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case I9."""
    model = load(tiny_target_folder(tmp_path, max_position_embeddings=400), monkeypatch)
    assert isinstance(model.runner, EagerLayers)
    ids, pages = [i % 250 for i in range(300)], list(range(20))
    expected = model(flat_batch([(ids, 0, pages)]), make_pool(model, 20)).logits
    model.runner = graphed = GraphedLayers(model.runner, record_by_repeating)
    found = model(flat_batch([(ids, 0, pages)]), make_pool(model, 20)).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not graphed._graphs


@pytest.mark.gpu
def test_graphs_equal_eager_steps_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tiny_target_folder(tmp_path, num_hidden_layers=2), monkeypatch, "cuda")
    assert isinstance(model.runner, GraphedLayers)
    graphed = model.runner
    model.runner = graphed.layers
    compare(model, graphed, STEPS)
