"""A request on the host: its tokens, its text, where it stops, and what its client is told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dspark_core.sampler import RowSource
from dspark_core.sampling import SamplingParams
from server.kv import PageTable

FinishReason = Literal["stop", "length", "abort"]


class Detokenizer(Protocol):
    """Text of one token at a time; incomplete characters are held back."""

    def step(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True)
class RequestParams:
    """What a client asked for, validated.

    Attributes:
        max_tokens: tokens to generate at most; None is the rest of the context.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: ids that end the text like an end-of-text token.
        ignore_eos: go on past end-of-text tokens (not past `stop_token_ids`).
        logprobs: how many alternatives to report beside each token, or None.
        speculative: False decodes this request plainly.
        choice_index: which of the n choices of one call this is.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    speculative: bool = True
    choice_index: int = 0


@dataclass(frozen=True)
class TokenLogprob:
    """Target log-probability of an emitted token (before temperature and filters) and of the top alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Speculation:
    """Counts over a request's rounds with drafts: proposed, sent to the target, accepted and delivered."""

    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens per drafted round, the bonus token included."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0


@dataclass(frozen=True)
class Delta:
    """One thing to tell the client. Counts are running totals; the last delta has a finish_reason or an error."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason | None
    error: str | None
    completion_tokens: int
    speculation: Speculation

    @property
    def last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


@dataclass(eq=False)
class Request:
    """One sequence being generated; told apart by identity, since two clients may ask for the same.

    `0 <= table.kv_len <= len(tokens) - 1`, with equality while decoding; tokens from `kv_len` on are still to be run
    through the target.
    """

    prompt_ids: list[int]
    params: RequestParams
    max_tokens: int
    stop_ids: frozenset[int]
    key: int
    detokenizer: Detokenizer
    table: PageTable = field(default_factory=PageTable)
    tokens: list[int] = field(init=False)
    rounds: int = 0
    speculation: Speculation = field(default_factory=Speculation)
    decided_and_accepted: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    arrived: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)
        self._stops = StopStrings(self.params.stop)
        self._text_to_send = ""
        self._ids_to_send: list[int] = []
        self._logprobs_to_send: list[TokenLogprob] = []

    @property
    def pending(self) -> int:
        """Tokens that the target has not seen; 1 while decoding."""
        return len(self.tokens) - self.table.kv_len

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.prompt_ids)

    @property
    def output_ids(self) -> Sequence[int]:
        return self.tokens[len(self.prompt_ids) :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def append(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> int:
        """Take over a round's tokens up to the first event that ends the text; returns how many were taken."""
        for taken, token in enumerate(token_ids, 1):
            self.tokens.append(token)
            self._ids_to_send.append(token)
            if logprobs is not None:
                self._logprobs_to_send.append(logprobs[taken - 1])
            self._text_to_send += self._advance(token)
            if self.finished:
                return taken
        return len(token_ids)

    def count_round(self, *, drafted: int, verified: int, accepted: int, decided: int) -> None:
        """Add a round with drafts to the statistics.

        Args:
            decided: positions of the block that were found accepted or rejected: not those after a rejection, nor
                those after the end of the text.
        """
        self.decided_and_accepted.append((decided, accepted))
        s = self.speculation
        self.speculation = Speculation(s.rounds + 1, s.drafted + drafted, s.verified + verified, s.accepted + accepted)

    def _advance(self, token: int) -> str:
        """Text that one more token makes final; sets finish_reason when it ends the request."""
        if token in self.stop_ids:
            self.finish_reason = "stop"
            return self._stops.feed(self.detokenizer.flush()) + self._stops.rest()
        text = self._stops.feed(self.detokenizer.step(token))
        if self._stops.found:
            self.finish_reason = "stop"
        elif self.num_generated >= self.max_tokens:
            self.finish_reason = "length"
            text += self._stops.feed(self.detokenizer.flush())
            if self._stops.found:
                self.finish_reason = "stop"
            text += self._stops.rest()
        return text

    def source(self) -> RowSource:
        """What sampling needs to know for the next round; the tokens so far only where penalties look at them."""
        sampling = self.params.sampling
        return RowSource(
            params=sampling,
            key=self.key,
            round=self.rounds,
            position=len(self.tokens),
            prompt_ids=self.prompt_ids if sampling.penalised else (),
            output_ids=self.output_ids if sampling.penalised else (),
        )

    def abort(self) -> Delta:
        """End at the client's wish."""
        self.finish_reason = "abort"
        return self._make_delta()

    def fail(self, message: str) -> Delta:
        """End with an internal error, which the client is told."""
        self.error, self.finish_reason = message, None
        return self._make_delta()

    def take_delta(self) -> Delta | None:
        """What is new for the client; None while nothing can be said yet."""
        return self._make_delta() if self._text_to_send or self.finished else None

    def _make_delta(self) -> Delta:
        delta = Delta(
            text=self._text_to_send,
            token_ids=self._ids_to_send,
            logprobs=self._logprobs_to_send if self.params.logprobs is not None else None,
            finish_reason=self.finish_reason,
            error=self.error,
            completion_tokens=self.num_generated,
            speculation=self.speculation,
        )
        self._text_to_send, self._ids_to_send, self._logprobs_to_send = "", [], []
        return delta


class StopStrings:
    """Finds the earliest stop string in a growing text, and holds back what could still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.held, self.found = stops, "", False

    def feed(self, text: str) -> str:
        """Text that is now final. After a stop was found nothing more comes."""
        if self.found or not text:
            return ""
        if not self.stops:
            return text
        self.held += text
        matches = [(place + len(stop), place) for stop in self.stops if (place := self.held.find(stop)) >= 0]
        if matches:
            # The one complete first, whatever pieces the text came in.
            self.found = True
            final, self.held = self.held[: min(matches)[1]], ""
            return final
        keep = max(self._overlap(stop) for stop in self.stops)
        final, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return final

    def rest(self) -> str:
        """What was held back, once no more text can come."""
        rest, self.held = ("" if self.found else self.held), ""
        return rest

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        for size in range(min(len(stop) - 1, len(self.held)), 0, -1):
            if stop.startswith(self.held[-size:]):
                return size
        return 0
