"""A request on the host: its tokens, its text, where it stops, and what its client is told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dspark_core.adjustments import RowSource
from dspark_core.grammar import Grammar
from dspark_core.sampling import SamplingParams
from server.detail import RoundDetail, TokenText
from server.kv import PageTable
from server.stops import StopStrings

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
        min_tokens: tokens before which neither an end-of-text token nor a stop string ends the text.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: ids that end the text like an end-of-text token.
        ignore_eos: go on past end-of-text tokens (not past `stop_token_ids`).
        logprobs: how many alternatives to report beside each token, or None.
        prompt_logprobs: the same for the tokens of the prompt, which is then computed as a whole.
        grammar: what the text must conform to.
        detail: report what became of each round's draft.
        speculative: False decodes this request plainly.
        whole_blocks: draft and verify whole blocks for it, whatever pays.
        choice_index: which of the n choices of one call this is.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    detail: bool = False
    speculative: bool = True
    whole_blocks: bool = False
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
    rounds: list[RoundDetail] | None = None

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
    admitted: float | None = None  # when it first left the queue, on the same clock

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)
        self.keeps_context: bool | None = None  # of the draft; undecided before it is admitted
        self._stops = StopStrings(self.params.stop)
        self._text_to_send = ""
        self._ids_to_send: list[int] = []
        self._logprobs_to_send: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []  # of the second token and on; whole when decoding begins
        self.constraint = self.params.grammar.start() if self.params.grammar else None
        self._texts: list[TokenText] = []  # of this round, where details are wanted
        self._rounds_to_send: list[RoundDetail] = []

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
        for taken, token in enumerate(token_ids):
            if self.constraint and self.constraint.error:  # nobody knows whether the token may stand
                self.error = f"the grammar cannot be followed: {self.constraint.error}"
                return taken
            self.tokens.append(token)
            self._ids_to_send.append(token)
            if logprobs is not None:
                self._logprobs_to_send.append(logprobs[taken])
            self._text_to_send += self._advance(token)
            self._follow(token)
            if self.finished:
                return taken + 1
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
            return self._feed(token, self.detokenizer.flush()) + self._stops.rest()
        text = self._feed(token, self.detokenizer.step(token))
        if self._stops.found:
            self.finish_reason = "stop"
        elif self.num_generated >= self.max_tokens:
            text += self._end("length")
        return text

    def _feed(self, token: int, text: str) -> str:
        """The text of a token, as far as it is final."""
        if self.params.detail:
            self._texts.append(TokenText(token, text))
        return self._look_for_stops(text)

    def _look_for_stops(self, text: str) -> str:
        """Text that is final; a stop string ends it only where there are enough tokens."""
        return self._stops.feed(text, may_end=self.num_generated > self.params.min_tokens)

    def _end(self, reason: FinishReason) -> str:
        """End here, for another reason than the text itself; returns what was held back."""
        self.finish_reason = reason
        left = self.detokenizer.flush()
        if self._texts:  # of the last token: bytes that became no character
            self._texts[-1] = TokenText(self._texts[-1].token_id, self._texts[-1].text + left)
        text = self._look_for_stops(left)
        if self._stops.found:
            self.finish_reason = "stop"
        return text + self._stops.rest()

    def _follow(self, token: int) -> None:
        """Keep the grammar in step with the text, and end the text where the grammar ends."""
        if self.constraint is None or self.finish_reason == "stop":
            return
        self.constraint.advance(token)
        if self.constraint.finished:
            if self.finish_reason is None:
                self._text_to_send += self._end("stop")
            self.finish_reason = "stop"

    def keep_detail(
        self, draft_ids: Sequence[int], confidence: Sequence[float | None] | None, verified: int, accepted: int
    ) -> None:
        """Remember what became of the round that was just appended, for the client."""
        detail = RoundDetail(draft_ids, confidence, verified, accepted, self._texts)
        self._texts = []
        self._rounds_to_send.append(detail)

    def source(self) -> RowSource:
        """What sampling needs to know for the next round; the tokens so far only where penalties look at them."""
        sampling = self.params.sampling
        banned_slots, banned_ids = max(self.params.min_tokens - self.num_generated, 0), self.stop_ids
        if self.constraint:
            banned_ids |= self.constraint.end_ids  # whatever ignore_eos says
        return RowSource(
            params=sampling,
            key=self.key,
            round=self.rounds,
            position=len(self.tokens),
            prompt_ids=self.prompt_ids if sampling.penalised else (),
            output_ids=self.output_ids if sampling.penalised else (),
            banned_ids=sorted(banned_ids) if banned_slots else (),
            banned_slots=banned_slots,
            constraint=self.constraint,
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
            rounds=self._rounds_to_send if self.params.detail else None,
        )
        self._rounds_to_send = []
        self._text_to_send, self._ids_to_send, self._logprobs_to_send = "", [], []
        return delta
