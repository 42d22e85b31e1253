"""Reads what /metrics says."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from server.async_engine import AsyncEngine
from server.metrics import Metrics
from server.request_metrics import REASONS

# Histograms of seconds, the one of whole requests left out.
LENGTHS = ("time_to_first_token", "inter_token_latency", "time_per_output_token", "request_queue_time")


class Scrape:
    """What one reading of /metrics says, under the names that users type."""

    def __init__(self, text: bytes) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text.decode())}
        self.samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name: str, *labels: str) -> float:
        return self.samples[f"dspark:{name}", *labels]

    def observed(self, name: str) -> tuple[float, float]:
        """How often a histogram of seconds was observed, and the seconds."""
        return self(f"{name}_seconds_count"), self(f"{name}_seconds_sum")

    @property
    def finished(self) -> dict[str, float]:
        return {reason: self("request_success_total", reason) for reason in REASONS}


def scrape(engine: AsyncEngine) -> Scrape:
    return Scrape(Metrics(engine).text())
