"""What became of requests, for /metrics: counted when their clients are told, by the thread that tells them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from prometheus_client.core import Metric

from server.request import Delta, Request
from server.series import BY_NAME, SERIES, Values

REASONS = ("stop", "length", "abort", "error")


@dataclass
class Progress:
    """What a client has been told so far.

    Attributes:
        first, latest: when it got its first and its latest tokens, in seconds of the monotonic clock.
        first_tokens: how many came first.
    """

    first: float | None = None
    latest: float = 0.0
    first_tokens: int = 0


class RequestMetrics:
    """Counters and histograms of requests. Every call leaves them in agreement with each other.

    Latencies are those of answers that ran to their end, as far as they did: what a client that hung up, or a fault,
    cut short says nothing of the server's speed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._finished = dict.fromkeys(REASONS, 0)
        self._rejected = self._prompt_tokens = self._generation_tokens = 0
        histograms = {series.name: series.histogram() for series in SERIES if series.kind == "histogram"}
        self._histograms = histograms
        self._first_token = histograms["time_to_first_token_seconds"]
        self._between_tokens = histograms["inter_token_latency_seconds"]
        self._per_token = histograms["time_per_output_token_seconds"]
        self._queued = histograms["request_queue_time_seconds"]
        self._whole = histograms["e2e_request_latency_seconds"]

    def reject(self, count: int) -> None:
        """Requests were refused because the queue was full."""
        with self._lock:
            self._rejected += count

    def tell(self, request: Request, delta: Delta, progress: Progress) -> None:
        """A client is told something; `progress` is brought up to date."""
        now, count = time.monotonic(), len(delta.token_ids)
        cut = delta.error is not None or delta.finish_reason == "abort"
        with self._lock:
            self._generation_tokens += count
            if count and not cut:
                self._time_tokens(request, count, progress, now)
            if delta.last:
                self._end(request, delta, progress, now)

    def _time_tokens(self, request: Request, count: int, progress: Progress, now: float) -> None:
        if progress.first is None:
            self._prompt_tokens += len(request.prompt_ids)
            self._first_token.observe(now - request.arrived)
            progress.first, progress.first_tokens = now, count
        else:
            # Tokens that come together share the time since the last ones: each counts, none as if it came at once.
            each = (now - progress.latest) / count
            for _ in range(count):
                self._between_tokens.observe(each)
        progress.latest = now

    def _end(self, request: Request, delta: Delta, progress: Progress, now: float) -> None:
        self._finished[delta.finish_reason or "error"] += 1
        self._queued.observe((request.admitted or now) - request.arrived)
        if delta.finish_reason not in ("stop", "length"):
            return
        self._whole.observe(now - request.arrived)
        later = delta.completion_tokens - progress.first_tokens
        if progress.first is not None and later > 0:
            self._per_token.observe((progress.latest - progress.first) / later)

    def collect(self) -> dict[str, Metric]:
        """The families of one moment, by name."""
        with self._lock:
            counters: dict[str, Values] = {
                "request_success": {(reason,): count for reason, count in self._finished.items()},
                "requests_rejected": self._rejected,
                "prompt_tokens": self._prompt_tokens,
                "generation_tokens": self._generation_tokens,
            }
            families = {name: next(iter(one.collect())) for name, one in self._histograms.items()}
        for family in families.values():  # when a histogram was made is of no use beside a process' own start time
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        return families | {name: BY_NAME[name].family(values) for name, values in counters.items()}
