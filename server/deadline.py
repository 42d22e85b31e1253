"""When the request at hand must have ended: set where it arrives, kept wherever it waits."""

from __future__ import annotations

import time
from contextvars import ContextVar

# Seconds of time.monotonic(); None: it may take as long as it does.
_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)


class RequestTimeoutError(RuntimeError):
    """The request took longer than --request-timeout allows."""

    def __init__(self) -> None:
        super().__init__("the request took longer than the server allows (--request-timeout)")


def begin(seconds: float | None) -> None:
    """The request that this task serves arrives now and may take so long."""
    _deadline.set(None if seconds is None else time.monotonic() + seconds)


def remaining() -> float | None:
    """Seconds that are left, None without a limit; RequestTimeoutError when there are none."""
    if (end := _deadline.get()) is None:
        return None
    if (left := end - time.monotonic()) <= 0:
        raise RequestTimeoutError
    return left
