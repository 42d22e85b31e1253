"""Compiling kernels once per version of their source, not once per process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from numba import types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc

from dspark_core.kernels import source_key

logger = logging.getLogger(__name__)

_SIGNATURE = ((types.CPointer(types.int64),), types.void)


class _Cache(FunctionCache):
    """Numba's cache asks only whether the function's own file has changed; and it takes what a closure holds, here the
    functions for a kind of weights, for new in every process."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return sig, codegen.magic_tuple(), self._py_func.__qualname__, source_key()


class _Callback(CFunc):
    def enable_caching(self) -> None:
        self._cache = _Cache(self._pyfunc)  # type: ignore[attr-defined]


def compile_kernel(function: Callable[[Any], None]) -> Any:
    """A C callback `void (int64*)` of a function; its `address` is what threads call."""
    compiled = _Callback(function, _SIGNATURE, {}, {"nopython": True, "error_model": "numpy"})
    try:
        compiled.enable_caching()
    except RuntimeError as error:  # no folder to write to
        logger.warning("kernels are compiled anew in every process: %s", error)
    compiled.compile()
    return compiled


def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Give a function made by another one a name of its own: compiled code of several processes is linked by name."""
    function.__qualname__ = function.__name__ = name
    return function
