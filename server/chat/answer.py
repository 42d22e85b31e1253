"""An answer as it comes: its pieces, each with what became of it, and what it took."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
# A model can write what a terminal obeys: only line ends and tabs get through.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Text without control characters; U+FFFD stands for each."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


@dataclass
class Answer:
    """Takes over the events of one request with `"detail": true`.

    Attributes:
        text: what the server sent so far.
        tokens: how many tokens have come.
        clock: seconds of a monotonic clock.
    """

    clock: Callable[[], float] = time.monotonic
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    counts: Json = field(default_factory=lambda: dict.fromkeys(("rounds", "drafted", "verified", "accepted"), 0))

    def __post_init__(self) -> None:
        self._shown = 0
        self._first: tuple[float, int] | None = None
        self._last = 0.0

    def add(self, event: Json) -> Iterator[tuple[str, str]]:
        """Text and source of every piece that an event brings; source is "" for text that is no token's."""
        self._count(event)
        self.text += event["text"]
        for round_ in event.get("rounds", ()):
            for token in round_["tokens"]:
                # A stop string cuts the text inside a token: what was not sent is not shown.
                piece = token["text"][: len(self.text) - self._shown]
                self._shown += len(piece)
                yield piece, token["source"]
        if event.get("finish_reason") or "rounds" not in event:
            yield self.text[self._shown :], ""
            self._shown = len(self.text)

    def _count(self, event: Json) -> None:
        self.tokens += len(event["token_ids"])
        if event["token_ids"]:
            self._last = self.clock()
            self._first = self._first or (self._last, self.tokens)
        for round_ in event.get("rounds", ()):
            self.counts["rounds"] += round_["drafted"] > 0
            for name in ("drafted", "verified", "accepted"):
                self.counts[name] += round_[name]
        self.counts |= event.get("speculation", {})
        self.finish_reason = event.get("finish_reason")

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first event, so that reading the prompt does not count."""
        if self._first is None or self.tokens == self._first[1]:
            return None
        return (self.tokens - self._first[1]) / max(self._last - self._first[0], 1e-9)

    def stats(self) -> str:
        """The line below an answer."""
        parts = [f"{self.tokens} {'token' if self.tokens == 1 else 'tokens'}"]
        if self.rate is not None:
            parts.append(f"{self.rate:.1f} tokens/s")
        if rounds := self.counts["rounds"]:
            parts.append(f"acceptance length {1 + self.counts['accepted'] / rounds:.2f}")
            parts.append("{accepted} accepted / {verified} verified / {drafted} drafted".format_map(self.counts))
        else:
            parts.append("nothing drafted")
        if self.finish_reason == "length":
            parts.append("ended at max tokens")
        return " · ".join(parts)
