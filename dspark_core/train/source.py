"""Where a run's sequences and their hidden states come from: a cache, or the target as they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from dspark_core.errors import CheckpointError
from dspark_core.models.decoder import TargetModel
from dspark_core.train.data import Example
from dspark_core.train.features import FeatureCache, States, TargetStates


class Source(Protocol):
    """Sequences, and states of some of them."""

    @property
    def examples(self) -> Sequence[Example]: ...

    @property
    def target_layer_ids(self) -> tuple[int, ...]: ...

    def states(self, indices: Sequence[int]) -> list[States]: ...


class CachedSource:
    """From finished caches of one target and the same taps; sequences are cut to `max_length`.

    Raises:
        CheckpointError: the caches hold different layers, or a sequence twice.
    """

    def __init__(self, caches: Sequence[FeatureCache], max_length: int) -> None:
        self._max_length = max_length
        self.target_layer_ids = caches[0].target_layer_ids
        self._places: list[tuple[FeatureCache, int]] = []
        self.examples: list[Example] = []
        seen: set[str] = set()
        for cache in caches:
            if cache.target_layer_ids != self.target_layer_ids:
                raise CheckpointError(
                    f"{cache.folder} holds layers {list(cache.target_layer_ids)}, {caches[0].folder} "
                    f"{list(self.target_layer_ids)}; expected the same in all caches"
                )
            for index, example in enumerate(cache.examples):
                if example.id in seen:
                    raise CheckpointError(f"{cache.folder}: sequence {example.id!r} is in another cache too")
                seen.add(example.id)
                self._places.append((cache, index))
                self.examples.append(example.cut(max_length))

    def states(self, indices: Sequence[int]) -> list[States]:
        found = [cache.states(place) for cache, place in (self._places[index] for index in indices)]
        return [States(s.features[: self._max_length], s.last_hidden[: self._max_length]) for s in found]


class OnlineSource:
    """From the target itself. `target` must be prepared before the first use."""

    def __init__(self, examples: Sequence[Example], target: TargetModel, target_layer_ids: Sequence[int]) -> None:
        self.examples, self.target_layer_ids = examples, tuple(target_layer_ids)
        self._states = TargetStates(target, target_layer_ids)

    def states(self, indices: Sequence[int]) -> list[States]:
        return self._states([self.examples[index].token_ids for index in indices])


def open_cache(folder: Path, target_fingerprint: str) -> FeatureCache:
    """A cache that belongs to the target.

    Raises:
        CheckpointError: it was made with another one, or is unusable.
    """
    cache = FeatureCache(folder)
    if (found := cache.origin.get("target", str)) != target_fingerprint:
        raise CheckpointError(f"{folder}: made with the target {found}, the run's is {target_fingerprint}")
    return cache
