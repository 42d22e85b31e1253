"""Names of functions that other functions make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Give a function made by another one a name of its own: compiled code is linked by name."""
    function.__qualname__ = function.__name__ = name
    return function
