"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the earliest stop string in a growing text, and holds back what could still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.held, self.found = stops, "", False
        self._passed = 0  # characters at the start of `held` in which no stop may end

    def feed(self, text: str, *, may_end: bool = True) -> str:
        """Text that is now final. After a stop was found nothing more comes.

        Args:
            may_end: whether a stop string that ends in this text counts; it may always begin in it.
        """
        if self.found or not text:
            return ""
        if not self.stops:
            return text
        self.held += text
        if not may_end:
            self._passed = len(self.held)
        matches = [(place + len(stop), place) for stop in self.stops if (place := self._find(stop)) >= 0]
        if matches:
            # The one complete first, whatever pieces the text came in.
            self.found = True
            final, self.held = self.held[: min(matches)[1]], ""
            return final
        keep = max(self._overlap(stop) for stop in self.stops)
        final, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        self._passed = max(self._passed - len(final), 0)
        return final

    def rest(self) -> str:
        """What was held back, once no more text can come."""
        rest, self.held = ("" if self.found else self.held), ""
        return rest

    def _find(self, stop: str) -> int:
        """Where the held text has a stop string that counts first, or -1."""
        return self.held.find(stop, max(self._passed - len(stop) + 1, 0))

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        for size in range(min(len(stop) - 1, len(self.held)), 0, -1):
            if stop.startswith(self.held[-size:]):
                return size
        return 0
