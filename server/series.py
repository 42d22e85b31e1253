"""The series of `GET /metrics`, each written once: docs/metrics.md lists the same, and a test compares the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PREFIX = "dspark:"
# Bounds of the buckets, a factor of two apart at most: a quantile read off them is wrong by less than that.
SECONDS = [float(f"{digit}e{exponent}") for exponent in range(-3, 3) for digit in (1, 2, 3, 5)]
Values = float | Mapping[tuple[str, ...], float]


@dataclass(frozen=True)
class Series:
    """One family of samples.

    Attributes:
        name: without `PREFIX`, and of a counter without `_total`.
        text: its meaning, one sentence.
        labels: names of its labels.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    text: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """As users type it. A histogram's samples add `_bucket`, `_sum` and `_count`."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    def family(self, values: Values) -> Metric:
        """The samples of a counter or gauge: a number, or numbers by the values of the labels."""
        assert self.kind != "histogram"
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = make(PREFIX + self.name, self.text, labels=self.labels)
        for labels, value in (values if isinstance(values, Mapping) else {(): values}).items():
            family.add_metric(labels, value)
        return family

    def histogram(self) -> Histogram:
        """To be observed in seconds."""
        assert self.kind == "histogram"
        return Histogram(PREFIX + self.name, self.text, buckets=SECONDS, registry=None)


SERIES = (
    Series(
        "info",
        "gauge",
        "always 1",
        "What serves: models, draft, how lengths are chosen, where.",
        ("version", "model_name", "target", "draft", "verification", "calibration", "dtype", "device"),
    ),
    Series("num_requests_running", "gauge", "requests", "Requests being decoded, prompts in work included."),
    Series("num_requests_waiting", "gauge", "requests", "Requests in the queue."),
    Series("request_success", "counter", "requests", "Requests that ended, by how they did.", ("finished_reason",)),
    Series("requests_rejected", "counter", "requests", "Requests answered 503 because the queue was full."),
    Series("prompt_tokens", "counter", "tokens", "Tokens of prompts whose answer began, cached ones included."),
    Series("generation_tokens", "counter", "tokens", "Tokens handed to clients."),
    Series("time_to_first_token_seconds", "histogram", "seconds", "From arrival to the first tokens handed over."),
    Series("inter_token_latency_seconds", "histogram", "seconds", "Time between deliveries, per token delivered."),
    Series("time_per_output_token_seconds", "histogram", "seconds", "Mean time per later token of a request."),
    Series("request_queue_time_seconds", "histogram", "seconds", "From arrival to admission."),
    Series("e2e_request_latency_seconds", "histogram", "seconds", "From arrival to the last token handed over."),
    Series("kv_cache_usage_perc", "gauge", "0 to 1", "Share of the KV pages that requests hold."),
    Series("prefix_cache_queries", "counter", "tokens", "Tokens of admitted requests, looked for in the prefix cache."),
    Series("prefix_cache_hits", "counter", "tokens", "Tokens found there, which were not computed again."),
    Series("num_preemptions", "counter", "requests", "Requests sent back to the queue because KV memory was full."),
    Series("spec_decode_num_drafts", "counter", "rounds", "Rounds of requests in which a block was drafted."),
    Series("spec_decode_num_draft_tokens", "counter", "tokens", "Tokens drafted."),
    Series("spec_decode_num_verified_tokens", "counter", "tokens", "Draft tokens sent to the target."),
    Series("spec_decode_num_accepted_tokens", "counter", "tokens", "Draft tokens accepted."),
    Series(
        "spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "tokens",
        "Draft tokens accepted, by position from 0.",
        ("position",),
    ),
    Series("spec_decode_num_plain_rounds", "counter", "rounds", "Rounds of requests in which nothing was drafted."),
    Series(
        "spec_decode_predicted_accepted_tokens",
        "counter",
        "tokens",
        "Draft tokens that the calibrated confidence promised, of those whose fate is known.",
    ),
    Series(
        "spec_decode_calibration_error",
        "gauge",
        "0 to 1",
        "Running ECE of survival, by position from 0.",
        ("position",),
    ),
    Series("step_seconds", "counter", "seconds", "Seconds of steps without prompts."),
    Series("predicted_step_seconds", "counter", "seconds", "Seconds that those steps were predicted to take."),
)
BY_NAME = {series.name: series for series in SERIES}
