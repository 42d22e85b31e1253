"""The target's hidden states of training sequences: computed in flat batches, and cached in sharded safetensors."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from dspark_core.checkpoint.files import write_atomically
from dspark_core.errors import CheckpointError
from dspark_core.keys import Keys
from dspark_core.models.attention import FlatBatch, Segment
from dspark_core.models.decoder import TargetModel
from dspark_core.models.kv_cache import KVPool
from dspark_core.train.data import Example

INDEX = "features.json"
VERSION = 1
_PAGE = 64


@dataclass(frozen=True)
class States:
    """Hidden states of one sequence: tapped layer outputs [T, m * D], and the last ones after the final norm [T, D]."""

    features: Tensor
    last_hidden: Tensor


class TargetStates:
    """Computes states with a prepared target."""

    def __init__(self, target: TargetModel, target_layer_ids: Sequence[int]) -> None:
        self.target, self.taps = target, (*target_layer_ids, target.config.num_layers - 1)
        self._pool: KVPool | None = None

    @torch.inference_mode()
    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[States]:
        """States of whole sequences of token ids, in one pass."""
        target, device = self.target, self.target.device
        pages = [-(-len(ids) // _PAGE) for ids in sequences]
        pool = self._pool_of(sum(pages))
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        segments, first_page = [], 0
        for sequence, count in zip(sequences, pages, strict=True):
            table = range(first_page, first_page + count)
            segments.append(Segment(len(token_ids), len(sequence), 0, table))
            token_ids += sequence
            positions += range(len(sequence))
            slots += range(first_page * _PAGE, first_page * _PAGE + len(sequence))
            first_page += count
        ids, places, targets = (torch.tensor(values, device=device) for values in (token_ids, positions, slots))
        batch = FlatBatch(ids, places, targets, segments)
        output = target(batch, pool, logit_rows=torch.zeros(1, dtype=torch.int64, device=device), tap=self.taps)
        assert output.features is not None
        size = target.config.hidden_size
        parts = output.features.split([len(ids) for ids in sequences])
        return [States(part[:, :-size], target.norm(part[:, -size:])) for part in parts]

    def _pool_of(self, pages: int) -> KVPool:
        if self._pool is None or self._pool.num_pages < pages:
            self._pool = KVPool.of(self.target.config, pages, _PAGE, self.target.dtype, self.target.device)
        self._pool.clear(list(range(pages)))  # one sequence's NaN would spoil the next: 0 * NaN is NaN
        return self._pool


def cache_bytes(examples: Sequence[Example], hidden_size: int, num_taps: int, dtype: torch.dtype) -> int:
    """Size of a cache: taps in bfloat16, last hidden states in the target's type, token ids and loss mask."""
    return sum(len(e.token_ids) for e in examples) * (hidden_size * (num_taps * 2 + dtype.itemsize) + 5)


def write_cache(
    output: Path,
    examples: Sequence[Example],
    states: TargetStates,
    *,
    origin: dict[str, object],
    batch_tokens: int,
    shard_tokens: int,
) -> None:
    """Write a cache; one that was interrupted is completed shard by shard.

    Args:
        origin: what the states depend on (target, taps, ...): a cache of another origin is refused.

    Raises:
        CheckpointError: the folder holds a cache of another origin or of other data.
    """
    output.mkdir(parents=True, exist_ok=True)
    groups = _groups(examples, shard_tokens)
    shards = [[[example.id, example.domain, example.prompt, len(example.token_ids)] for example in g] for g in groups]
    whole = origin | {"shard_tokens": shard_tokens, "data": data_digest(examples)}
    plan = {"version": VERSION, "origin": json.loads(json.dumps(whole)), "shards": shards}
    index = output / INDEX
    if index.exists():
        begun = Keys.of_file(index).get("origin", dict)
        if different := [key for key, value in plan["origin"].items() if begun.get(key) != value]:
            key = different[0]
            raise CheckpointError(
                f"{output} holds a cache with {key} {begun.get(key)!r}, now it is {whole[key]!r}; "
                "expected the same, or another folder"
            )
    else:
        write_atomically(index, lambda file: file.write(json.dumps(plan).encode()))
    missing = [n for n in range(len(groups)) if not _shard(output, n).exists()]
    with tqdm(total=sum(len(e.token_ids) for n in missing for e in groups[n]), unit="token", unit_scale=True) as bar:
        for number in missing:
            tensors: dict[str, Tensor] = {}
            for batch in _groups(groups[number], batch_tokens):
                for example, state in zip(batch, states([e.token_ids for e in batch]), strict=True):
                    tensors |= _tensors(example, state)
                    bar.update(len(example.token_ids))
            write_atomically(_shard(output, number), partial(_write_bytes, save(tensors)))


def _write_bytes(content: bytes, file: IO[bytes]) -> None:
    file.write(content)


def _tensors(example: Example, state: States) -> dict[str, Tensor]:
    return {
        f"{example.id}/token_ids": torch.tensor(example.token_ids, dtype=torch.int32),
        f"{example.id}/supervised": torch.tensor(example.supervised, dtype=torch.uint8),
        f"{example.id}/features": state.features.to("cpu", torch.bfloat16).contiguous(),
        f"{example.id}/last_hidden": state.last_hidden.cpu().contiguous(),
    }


def data_digest(examples: Sequence[Example]) -> str:
    """A short name for what sequences say: their tokens and loss masks, in order."""
    digest = hashlib.blake2b(digest_size=8)
    for example in examples:
        digest.update(json.dumps(astuple(example)).encode())
    return digest.hexdigest()


def require_space(folder: Path, needed: int) -> None:
    """Raise CheckpointError when the disk cannot take `needed` more bytes."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise CheckpointError(f"{folder} needs {needed / 2**30:.1f} GiB, and the disk has {free / 2**30:.1f} GiB free")


def _groups(examples: Sequence[Example], tokens: int) -> list[list[Example]]:
    """Consecutive examples of together at most `tokens` tokens; a longer one makes a group of its own."""
    groups: list[list[Example]] = []
    room = 0
    for example in examples:
        size = len(example.token_ids)
        if size > room or not groups:
            groups.append([])
            room = tokens
        groups[-1].append(example)
        room -= size
    return groups


def _shard(folder: Path, number: int) -> Path:
    return folder / f"features-{number:05d}.safetensors"


class FeatureCache:
    """A finished cache: examples and, by their place, states, read from memory-mapped files.

    Attributes:
        examples: in the order they were written.
        origin: what the states depend on, as it was written.
        target_layer_ids: the tapped layers.

    Raises:
        CheckpointError: unfinished, damaged, or not a cache.
    """

    def __init__(self, folder: Path) -> None:
        keys = Keys.of_file(folder / INDEX)
        if (version := keys.get("version", int)) != VERSION:
            raise CheckpointError(f"{keys.where}: version is {version}, expected {VERSION}")
        self.folder = folder
        self.origin = Keys(keys.get("origin", dict), keys.where)
        self.target_layer_ids: tuple[int, ...] = tuple(self.origin.get("target_layer_ids", list))
        shards = keys.get("shards", list)
        absent = [n for n in range(len(shards)) if not _shard(folder, n).exists()]
        if absent:
            raise CheckpointError(
                f"{folder} is unfinished: {len(absent)} of {len(shards)} files are missing, the first "
                f"{_shard(folder, absent[0]).name}; run `dspark-train features` again"
            )
        self._files = [self._open(n) for n in range(len(shards))]
        self._places = [(n, names[0]) for n, shard in enumerate(shards) for names in shard]
        self.examples = [self._example(n, *names) for n, shard in enumerate(shards) for names in shard]

    def states(self, index: int) -> States:
        """States of `examples[index]`, on the CPU.

        Raises:
            CheckpointError: they cannot be read, have another length than their tokens, or are not finite.
        """
        number, name = self._places[index]
        states = States(*(self._read(number, f"{name}/{part}") for part in ("features", "last_hidden")))
        size = len(self.examples[index].token_ids)
        for part, tensor in (("features", states.features), ("last_hidden", states.last_hidden)):
            where = f"{_shard(self.folder, number)}: {name}/{part}"
            if tensor.shape[0] != size:
                raise CheckpointError(f"{where} has {tensor.shape[0]} rows, expected {size}")
            if not tensor.isfinite().all():
                raise CheckpointError(f"{where} holds NaN or infinity")
        return states

    def _example(self, number: int, name: str, domain: str, prompt: str, size: int) -> Example:
        ids = self._read(number, f"{name}/token_ids").tolist()
        supervised = self._read(number, f"{name}/supervised").bool().tolist()
        if not len(ids) == len(supervised) == size:
            found = f"{len(ids)} tokens and a loss mask of {len(supervised)}"
            raise CheckpointError(f"{_shard(self.folder, number)}: {name} has {found}, expected {size}")
        return Example(name, domain, prompt, ids, supervised)

    def _open(self, number: int) -> safe_open:
        path = _shard(self.folder, number)
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged, expected a whole safetensors file: {error}") from None

    def _read(self, number: int, name: str) -> Tensor:
        try:
            tensor: Tensor = self._files[number].get_tensor(name)  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise CheckpointError(f"{_shard(self.folder, number)}: {name} cannot be read: {error}") from None
        return tensor
