"""A short name for the content of a model folder, to tell files made for one model from those made for another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import BinaryIO

_SAMPLES, _SAMPLE_BYTES, _SMALL = 64, 4096, 2**20


def fingerprint(folder: Path) -> str:
    """16 hexadecimal digits of config.json and of the weights: small tensors whole, samples spread over the others.

    Reads a few MB, so that it costs nothing at start. Retraining moves every weight, so that samples show it; a head of
    a thousand weights that was trained alone is read whole.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for start, count in _parts(file, size):
                file.seek(start)
                digest.update(file.read(count))
    return digest.hexdigest()


def _parts(file: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Offsets and lengths to read: the header, small tensors, samples."""
    samples = [(size * k // _SAMPLES, _SAMPLE_BYTES) for k in range(_SAMPLES)]
    try:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, size)))
        spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        small = [(8 + length + begin, end - begin) for begin, end in sorted(spans) if end - begin <= _SMALL]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # loading will say what is wrong with it
        return samples
    return [(0, 8 + length), *small, *samples]
