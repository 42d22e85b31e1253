"""`GET /metrics`: what the engine counts, for Prometheus. The names are those of the field after our own prefix."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from server.async_engine import AsyncEngine

CONTENT_TYPE = CONTENT_TYPE_LATEST


class EngineCollector(Collector):
    """Reads the engine's counts when it is asked for them: nothing is paid for metrics in a step."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        """One family after the other."""
        watch = self.engine.watch
        counts = watch.counts
        yield GaugeMetricFamily("dspark:num_requests_running", "Requests being decoded.", self.engine.num_running)
        yield GaugeMetricFamily("dspark:num_requests_waiting", "Requests in the queue.", self.engine.num_waiting)
        yield from (
            CounterMetricFamily(f"dspark:{name}", text, value)
            for name, text, value in (
                ("spec_decode_num_drafts", "Rounds of requests in which a block was drafted.", counts.rounds),
                ("spec_decode_num_draft_tokens", "Tokens drafted.", counts.drafted),
                ("spec_decode_num_verified_tokens", "Draft tokens sent to the target.", counts.verified),
                ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", counts.accepted),
                (
                    "spec_decode_num_plain_rounds",
                    "Rounds of requests in which nothing was drafted.",
                    counts.plain_rounds,
                ),
                (
                    "spec_decode_predicted_accepted_tokens",
                    "Draft tokens that the calibrated confidence promised, of those whose fate is known.",
                    counts.predicted,
                ),
                ("step_seconds", "Seconds of steps without prompts.", counts.seconds),
                (
                    "predicted_step_seconds",
                    "Seconds that those steps were predicted to take.",
                    counts.predicted_seconds,
                ),
            )
        )
        per_position = CounterMetricFamily(
            "dspark:spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position.", labels=["position"]
        )
        for position, value in enumerate(counts.accepted_at):
            per_position.add_metric([str(position)], value)
        yield per_position
        errors = GaugeMetricFamily(
            "dspark:spec_decode_calibration_error", "Running ECE of survival, by position.", labels=["position"]
        )
        for position, error in enumerate(watch.errors):
            if not np.isnan(error):
                errors.add_metric([str(position)], float(error))
        yield errors


class Metrics:
    """The series of one server, in a registry of its own."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine))

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)
