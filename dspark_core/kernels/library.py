"""Compiled kernels: made once for a version of their source and a kind of CPU, then loaded without the compiler.

Numba and what it imports take 80 MB and most of a second. So a process of its own compiles all kernels into one object
file, and those that serve only link it.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path

import llvmlite.binding as llvm

from dspark_core.checkpoint.files import cache_folder, locked

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("source")
PACKAGES = Path(__file__).resolve().parents[2]


class Library:
    """Kernels of an object file, in memory.

    Args:
        data: the file's content.
    """

    def __init__(self, data: bytes) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine()
        self._linker = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._linker.add_object_file(llvm.ObjectFileRef.from_data(data))
        self._linker.finalize_object()

    def address(self, name: str) -> int:
        """Where a kernel begins. It stays there as long as this object lives."""
        address: int = self._linker.get_function_address(name)
        assert address, f"there is no kernel {name}"
        return address


@cache
def built_library() -> Library:
    """All kernels, compiled now if they never were. Raises RuntimeError if they cannot be."""
    name = f"kernels-{source_key()}.o"
    for folder in cache_folders():
        try:
            return Library(_built(folder / name).read_bytes())
        except OSError as error:
            logger.info("%s: no place for compiled kernels (%s)", folder, error.strerror)
    logger.warning("no folder to keep compiled kernels in: they are compiled anew in every process")
    with tempfile.TemporaryDirectory() as temporary:
        return Library(_built(Path(temporary) / name).read_bytes())


def cache_folders() -> list[Path]:
    """Where compiled kernels may lie: beside the source, else in the user's cache."""
    return [Path(__file__).with_name("__pycache__"), cache_folder() / "kernels"]


def _built(path: Path) -> Path:
    """The object file, made if it is missing. Other processes that need it wait for it."""
    if not path.is_file():
        with locked(path, on_wait=lambda: logger.info("another process compiles the CPU kernels")):
            if not path.is_file():
                logger.info("compiling the CPU kernels, once for this machine: about half a minute")
                _build(path)
    return path


def _build(path: Path) -> None:
    command = [sys.executable, "-m", "dspark_core.kernels.source.build", str(path)]
    # From the folder that holds our package: it need not be installed.
    done = subprocess.run(command, cwd=PACKAGES, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise RuntimeError(f"the CPU kernels cannot be compiled:\n{done.stderr.strip()}")


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
