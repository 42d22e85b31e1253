"""Compiled kernels: made once for a version of their source and a kind of CPU, then loaded without the compiler.

Numba and what it imports take 50 MB and most of a second. So a process of its own compiles all kernels into one object
file, and those that serve only link it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import ClassVar

import llvmlite.binding as llvm

from dspark_core.checkpoint.files import cache_folder, locked, write_atomically
from dspark_core.memory import give_back_library

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("source")
PACKAGES = Path(__file__).resolve().parents[2]


class Library:
    """Kernels of an object file, in memory. They stay there: somebody may run them long after this is forgotten.

    Args:
        data: the file's content.
    """

    _kept: ClassVar[list[Library]] = []

    def __init__(self, data: bytes) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine()
        self._linker = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._linker.add_object_file(llvm.ObjectFileRef.from_data(data))
        self._linker.finalize_object()
        self._kept.append(self)
        give_back_library("llvmlite")  # nearly 50 MB

    def address(self, name: str) -> int:
        """Where a kernel begins."""
        address: int = self._linker.get_function_address(name)
        assert address, f"there is no kernel {name}"
        return address


_once = Lock()


def built_library() -> Library:
    """All kernels, compiled now if they never were. Raises RuntimeError or OSError if they cannot be."""
    with _once:
        return _built_library()


@cache
def _built_library() -> Library:
    name = f"kernels-{source_key()}"
    for folder in cache_folders():
        try:
            with locked(folder / name, on_wait=lambda: logger.info("another process compiles the CPU kernels")):
                data = _kept_at(folder / name)
                if data is None:
                    data = _compiled()
                    _keep(folder / name, data)
                return Library(data)
        except OSError as error:
            logger.info("%s: no place for compiled kernels (%s)", folder, error.strerror)
    logger.warning("no folder to keep compiled kernels in: they are compiled anew in every process")
    return Library(_compiled())


def cache_folders() -> list[Path]:
    """Where compiled kernels may lie: beside the source, else in the user's cache."""
    return [Path(__file__).with_name("__pycache__"), cache_folder() / "kernels"]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _kept_at(path: Path) -> bytes | None:
    """The content of the object file; None if it is not there, not whole, or somebody else's."""
    if not path.is_file() or path.stat().st_uid not in (0, os.geteuid()):
        return None
    content = path.read_bytes()
    digest, data = content[:32], content[32:]
    return data if digest == _digest(data) else None


def _keep(path: Path, data: bytes) -> None:
    write_atomically(path, lambda file: file.write(_digest(data) + data))


@cache
def _compiled() -> bytes:
    """The object file, by a process of its own that sees the same packages."""
    logger.info("compiling the CPU kernels, once for this machine: about a quarter of a minute")
    places = [*(str(Path(place).absolute()) for place in sys.path if place), str(PACKAGES)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(places))}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.o"
        command = [sys.executable, "-P", "-m", "dspark_core.kernels.source.build", str(path), source_key()]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )
        if done.returncode:
            told = done.stderr.strip() or f"the compiler ended with code {done.returncode}"
            raise RuntimeError(f"the CPU kernels cannot be compiled: {told}")
        return path.read_bytes()


@cache
def source_key() -> str:
    """Of the kernels' source, of what compiles it and of the CPU that it is compiled for."""
    digest = hashlib.sha256()
    for path in sorted((*Path(__file__).parent.glob("*.py"), *SOURCE.glob("*.py"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in (
        version("numba"),
        version("llvmlite"),
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
    ):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]
