"""A row's bits do not depend on the rows beside it: what makes greedy speculation exact (float32 on the CPU)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark_core.checkpoint.load import load_target
from dspark_core.kernels import storage
from dspark_core.models import linear, runner
from dspark_core.models.compiled import CompiledLayers
from dspark_core.models.decoder import TargetModel
from dspark_core.models.eager import EagerLayers
from dspark_core.models.kv_cache import KVPool
from dspark_core.settings import CpuWeights
from tests.paged import flat_batch, make_pool
from tests.tiny import tiny_target_folder

# Around the sizes where attention kernels change: tiles of 16 and 64 rows, pages, key blocks and their halves.
BOUNDARIES = (1, 15, 63, 64, 65, 127, 128, 191, 192, 193, 255, 256, 383, 384, 385, 447, 511, 512, 513, 576)
LENGTH = 640
ODD: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 88, "vocab_size": 83, "num_hidden_layers": 2}
WIDE: dict[str, Any] = {**ODD, "hidden_size": 1056, "intermediate_size": 1128, "num_hidden_layers": 1}
# The demo target's layers.
DEMO: dict[str, Any] = {
    **ODD,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "num_hidden_layers": 1,
}


class Subject:
    """A prepared model, a token sequence, and every row's logits and layer outputs from one pass over all of it."""

    def __init__(self, folder: Path, page_size: int, seed: int = 0, cpu_weights: CpuWeights = "exact") -> None:
        self.model = load_target(folder)
        self.model.prepare(max_positions=LENGTH, cpu_weights=cpu_weights)
        self.page_size = page_size
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 83, (LENGTH,), generator=generator).tolist()
        self.pages = list(range(LENGTH // page_size))
        self.pool = make_pool(self.model, len(self.pages), page_size)
        self.whole = self.rows(0, LENGTH)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows of one request, [n, V + m * D]; their keys and values are written again, with the same bits."""
        return run(self.model, self.pool, [(self.ids[start:stop], start, self.pages)], self.page_size)

    def differing(self, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(a, b) for a, b in spans if not torch.equal(self.rows(a, b), self.whole[a:b])]


def run(
    model: TargetModel, pool: KVPool, parts: Sequence[tuple[Sequence[int], int, Sequence[int]]], page_size: int
) -> Tensor:
    output = model(flat_batch(parts, page_size), pool, tap=range(-1, model.config.num_layers))
    assert output.features is not None
    return torch.cat((output.logits, output.features), -1)


def spans_at(boundaries: Sequence[int], counts: Iterable[int]) -> list[tuple[int, int]]:
    return [(a, a + n) for n in counts for a in boundaries if a + n <= LENGTH]


def chunks(size: int) -> list[tuple[int, int]]:
    return [(a, min(a + size, LENGTH)) for a in range(0, LENGTH, size)]


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_every_row_count_and_every_chunking(page_size: int, tmp_path: Path) -> None:
    subject = Subject(tiny_target_folder(tmp_path, **ODD, max_position_embeddings=LENGTH), page_size)
    if page_size == 64:
        assert subject.differing(spans_at((1, 63, 191, 255, 383, 512), range(1, 65))) == []
    assert subject.differing(spans_at(BOUNDARIES, (1, 2, 5, 8, 9, 17, 33))) == []
    for size in (1 if page_size == 16 else 3, 6, 17, 64, 100, 512):
        assert subject.differing(chunks(size)) == [], f"chunks of {size}"


@pytest.fixture(params=[1, 2, 3], ids="{} threads".format)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("sizes", [WIDE, DEMO], ids=["over 1024 inputs", "demo sizes"])
def test_larger_layers(sizes: dict[str, Any], tmp_path: Path) -> None:
    subject = Subject(tiny_target_folder(tmp_path, **sizes, max_position_embeddings=LENGTH), 64)
    assert subject.differing(spans_at((0, 63, 192, 255, 384, 512), (1, 2, 3, 4, 6, 8, 9, 16, 24, 33, 64))) == []


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_requests_of_any_mix_beside_each_other(family: str, page_size: int, tmp_path: Path) -> None:
    """Several requests with scattered pages, in steps of random sizes: each row as in its request's own pass."""
    sizes = {**ODD, "head_dim": 10 if family == "qwen2" else 16, "max_position_embeddings": LENGTH}
    folder = tiny_target_folder(tmp_path, family, **sizes)
    subjects = [Subject(folder, page_size, seed) for seed in range(5)]
    model, source = subjects[0].model, random.Random(page_size)
    per_request = LENGTH // page_size
    shuffled = source.sample(range(5 * per_request), 5 * per_request)
    tables = [shuffled[i * per_request : (i + 1) * per_request] for i in range(5)]
    tables[0] = sorted(tables[0])
    pool = make_pool(model, 5 * per_request, page_size)
    done = [0] * 5
    for number, first in enumerate((0, 15, 130, 300, 500)):  # lengths far apart
        if first:
            run(model, pool, [(subjects[number].ids[:first], 0, tables[number])], page_size)
            done[number] = first
    for step in range(40):
        counts = [source.choice((0, 1, 1, 2, 5, 8, 17, 30)) for _ in range(5)]
        parts = [
            (s.ids[at : at + count], at, table)
            for s, at, count, table in zip(subjects, done, counts, tables, strict=True)
            if count and at + count <= LENGTH
        ]
        if not parts:
            continue
        rows = run(model, pool, parts, page_size).split([len(ids) for ids, _, _ in parts])
        for (ids, at, table), found in zip(parts, rows, strict=True):
            number = tables.index(table)
            expected = subjects[number].whole[at : at + len(ids)]
            assert torch.equal(found, expected), f"step {step}: request {number}, rows {at} to {at + len(ids)}"
            done[number] = at + len(ids)


def test_the_check_finds_a_runner_that_depends_on_its_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without it, an equality test that compares nothing would pass too."""
    subject = Subject(tiny_target_folder(tmp_path, **ODD, max_position_embeddings=LENGTH), 64)
    run_layers, spans = subject.model.runner, spans_at((1, 64, 192), (1, 2, 5, 8, 64))
    assert isinstance(run_layers, CompiledLayers)
    assert subject.differing(spans) == []

    def uneven(x: Tensor, *others: Any) -> tuple[Tensor, Tensor | None]:
        x, features = run_layers(x, *others)
        return x * (1 + 1e-6 * len(x)), features

    monkeypatch.setattr(subject.model, "runner", uneven)
    assert subject.differing(spans) == spans


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_kernels_compute_what_torch_operators_do(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {**ODD, "head_dim": 10 if family == "qwen2" else 16, "max_position_embeddings": LENGTH}
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    folder = tiny_target_folder(tmp_path, family, **sizes, **biases)
    subject = Subject(folder, 32)
    assert isinstance(subject.model.runner, CompiledLayers)
    assert subject.model.runner.exact
    for module in (runner, linear):
        monkeypatch.setattr(module, "can_pack", lambda device, dtype: False)
    eager = Subject(folder, 32)
    assert isinstance(eager.model.runner, EagerLayers)
    assert not eager.model.runner.exact
    torch.testing.assert_close(subject.whole, eager.whole, rtol=2e-4, atol=2e-4)
    assert torch.equal(subject.whole.argmax(-1), eager.whole.argmax(-1))


def test_bits_do_not_depend_on_how_exact_weights_are_stored(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path, hidden_size=64, intermediate_size=96, max_position_embeddings=LENGTH)
    weights = load_file(folder / "model.safetensors")
    for kind in (storage.INT4, storage.INT8, storage.BFLOAT16, storage.FLOAT16):
        stored = {name: round_to(w, kind) if w.dim() == 2 else w for name, w in weights.items()}
        save_file(stored, folder / "model.safetensors")
        found = []
        for how in ("exact", "float32"):
            subject = Subject(folder, 64, cpu_weights=how)
            runner_ = subject.model.runner
            assert isinstance(runner_, CompiledLayers)
            kinds = {layer.gate_up.kind for layer in runner_.layers}
            assert kinds == {storage.NAMES[kind] if how == "exact" else "float32"}
            found.append(subject.whole)
        assert torch.equal(*found), storage.NAMES[kind]


def round_to(weight: Tensor, kind: int) -> Tensor:
    if kind == storage.BFLOAT16:
        return weight.bfloat16().float()
    return storage.ROUND[kind](weight.contiguous())
