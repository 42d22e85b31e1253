"""What is counted and timed of a request, by a clock that a test turns."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from server.request import Delta, Request, Speculation
from server.request_metrics import REASONS, Progress, RequestMetrics
from tests.server.scrape import LENGTHS
from tests.server.test_policy import some_request


class Clock:
    """Stands for the monotonic clock of one request's life."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prompt_tokens: int = 5) -> None:
        self.now, self.metrics, self.progress, self.count = 100.0, RequestMetrics(), Progress(), 0
        monkeypatch.setattr("server.request_metrics.time.monotonic", lambda: self.now)
        self.request: Request = some_request()
        self.request.prompt_ids = [1] * prompt_tokens
        self.request.arrived = self.now

    def tell(self, seconds: float, tokens: int, reason: Any = None, error: str | None = None) -> None:
        """So long after the last event, the client is told so many tokens."""
        self.now, self.count = self.now + seconds, self.count + tokens
        delta = Delta("", [1] * tokens, None, reason, error, self.count, Speculation())
        self.metrics.tell(self.request, delta, self.progress)

    def samples(self, name: str) -> dict[str, float]:
        family = self.metrics.collect()[name]
        return {
            sample.name.rpartition("_")[2] + "".join(sample.labels.values()): sample.value for sample in family.samples
        }


def test_each_latency_is_observed_where_it_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.request.admitted = 100.25
    clock.tell(1.0, 2)  # two tokens at once are both the first
    clock.tell(0.25, 1)
    clock.tell(2.0, 4)
    clock.tell(0.75, 1, "stop")
    seen = {name: clock.samples(f"{name}_seconds") for name in (*LENGTHS, "e2e_request_latency")}
    told = {name: (samples["count"], samples["sum"]) for name, samples in seen.items()}
    assert told == {
        "time_to_first_token": (1, 1.0),
        "inter_token_latency": (6, 3.0),
        "time_per_output_token": (1, 0.5),
        "request_queue_time": (1, 0.25),
        "e2e_request_latency": (1, 4.0),
    }
    tokens = seen["inter_token_latency"]
    steps = [tokens[f"bucket{bound}"] - tokens[f"bucket{lower}"] for lower, bound in (("0.2", "0.3"), ("0.3", "0.5"))]
    assert steps == [1, 4], "four tokens that come after two seconds come each after half a second"
    assert (clock.samples("prompt_tokens")["total"], clock.samples("generation_tokens")["total"]) == (5, 8)


def test_an_answer_of_one_delivery_has_no_time_between_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.tell(1.0, 3, "length")
    counts = [clock.samples(f"{name}_seconds")["count"] for name in LENGTHS]
    assert counts == [1, 0, 0, 1]


@pytest.mark.parametrize("reason", ["abort", None], ids=["abort", "error"])
def test_what_was_cut_short_is_counted_and_not_timed(monkeypatch: pytest.MonkeyPatch, reason: str | None) -> None:
    clock = Clock(monkeypatch)
    clock.request.admitted = 101.0
    clock.tell(5.0, 1)
    clock.tell(50.0, 2, reason, None if reason else "a fault")
    counts = [clock.samples(f"{name}_seconds")["count"] for name in (*LENGTHS, "e2e_request_latency")]
    assert counts == [1, 0, 0, 1, 0]
    assert clock.samples("generation_tokens")["total"] == 3
    assert clock.samples("request_success") == {f"total{r}": int(r == (reason or "error")) for r in REASONS}


def test_who_left_the_queue_unserved_had_waited_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.tell(7.0, 0, "abort")
    assert clock.samples("request_queue_time_seconds")["sum"] == 7.0
    assert clock.samples("time_to_first_token_seconds")["count"] == 0
    assert clock.samples("prompt_tokens")["total"] == 0


def test_nobody_reads_half_of_what_a_client_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    reader = threading.Thread(target=clock.metrics.collect)
    count = clock.metrics._end

    def while_somebody_reads(*args: Any) -> None:
        reader.start()
        reader.join(0.05)
        assert reader.is_alive()
        count(*args)

    monkeypatch.setattr(clock.metrics, "_end", while_somebody_reads)
    clock.tell(1.0, 1, "stop")
    reader.join()
