"""Kernels that tests bring along."""

from __future__ import annotations

from functools import cache

from dspark_core.kernels.launch import Kernel
from dspark_core.kernels.library import Library
from dspark_core.kernels.source.build import Function, compiled


def local_kernel(function: Function) -> Kernel:
    """A kernel that is compiled in this process when it is first needed."""
    name = function.__name__.strip("_")

    @cache
    def library() -> Library:
        return Library(compiled({name: function}))

    return Kernel(name, library)
