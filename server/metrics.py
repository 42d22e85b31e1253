"""`GET /metrics`: what the engine counts, for Prometheus. The names are those of the field after our own prefix."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from dspark_core import __version__
from server.async_engine import AsyncEngine
from server.series import BY_NAME, SERIES, Values

CONTENT_TYPE = CONTENT_TYPE_LATEST


class EngineCollector(Collector):
    """Reads an engine's counts when it is asked for them, while its thread runs.

    Args:
        model_name: what clients call the model; empty: the target's name.
    """

    def __init__(self, engine: AsyncEngine, model_name: str = "") -> None:
        self.engine, self.model_name = engine, model_name

    def collect(self) -> Iterator[Metric]:
        """One family after the other, in the order of `SERIES`."""
        # A step is counted by the engine before its tokens are handed over: read the other way round, no scrape shows
        # tokens of rounds that it does not show.
        families = self.engine.requests.collect()
        numbers = self._info() | self._state() | self._speculation()
        families |= {name: BY_NAME[name].family(values) for name, values in numbers.items()}
        for series in SERIES:
            yield families[series.name]

    def _info(self) -> dict[str, Values]:
        info = self.engine.info
        name = self.model_name or info.get("target", "").partition(" (")[0]
        told = info | {"version": __version__, "model_name": name}
        # Where a folder lies is nobody's business.
        labels = tuple(re.sub(r"(?<!\S)/\S*/", "", told.get(label, "")) for label in BY_NAME["info"].labels)
        return {"info": {labels: 1.0}}

    def _state(self) -> dict[str, Values]:
        """How full the engine is, and its memory's counts."""
        scheduler, memory = self.engine.engine.scheduler, self.engine.engine.memory
        return {
            "num_requests_running": self.engine.num_running,
            "num_requests_waiting": self.engine.num_waiting,
            "kv_cache_usage_perc": 1 - memory.num_free / memory.num_pages,
            "prefix_cache_hits": scheduler.prefix_hits,  # before the queries: there are never more of them
            "prefix_cache_queries": scheduler.prefix_queries,
            "num_preemptions": scheduler.num_preemptions,
        }

    def _speculation(self) -> dict[str, Values]:
        counts, errors = self.engine.watch.read()
        return {
            "spec_decode_num_drafts": counts.rounds,
            "spec_decode_num_draft_tokens": counts.drafted,
            "spec_decode_num_verified_tokens": counts.verified,
            "spec_decode_num_accepted_tokens": counts.accepted,
            "spec_decode_num_accepted_tokens_per_pos": {(str(k),): n for k, n in enumerate(counts.accepted_at)},
            "spec_decode_num_plain_rounds": counts.plain_rounds,
            "spec_decode_predicted_accepted_tokens": counts.predicted,
            "spec_decode_calibration_error": {(str(k),): e for k, e in enumerate(errors) if not np.isnan(e)},
            "step_seconds": counts.seconds,
            "predicted_step_seconds": counts.predicted_seconds,
        }


class Metrics:
    """The series of one server, in a registry of its own."""

    def __init__(self, engine: AsyncEngine, model_name: str = "") -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(EngineCollector(engine, model_name))

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)
