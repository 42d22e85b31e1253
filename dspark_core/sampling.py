"""From logits to distributions and draws. One function makes probabilities; drafting and verification share it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dspark_core.devices import tensor_on
from dspark_core.errors import RequestError
from dspark_core.kernels import have_kernels

# Below this, dividing by the temperature only loses digits: it is greedy decoding.
GREEDY_TEMPERATURE = 1e-5
MAX_TEMPERATURE = 1e30  # more is flat too, and its inverse no number in float32
MAX_SEED = 2**63 - 1
Regime = Literal["greedy", "ratio", "coupled"]
REGIMES: tuple[Regime, ...] = get_args(Regime)
RANKED_SIZES = (1024, 8192)
MAX_TOP_K = 2**31  # more than any vocabulary; larger integers fit no tensor


@dataclass(frozen=True)
class SamplingParams:
    """How the next token of one request is chosen.

    Attributes:
        temperature: 0 (or below 1e-5) is greedy.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens that reaches this mass.
        min_p: keep tokens at least this times as likely as the most likely one.
        presence_penalty, frequency_penalty: taken off the logits of tokens generated before, once and per occurrence.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output; from
            0.01 to 100, so that logits stay finite.
        logit_bias: (token id, what is added to its logit, from -100 to 100).
        seed: selects the coupled rule; the text then depends on the seed alone.

    Raises:
        RequestError: a value out of range; `field` names it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise RequestError(f"{item.name} is {value}, expected a finite number", item.name)
        _expect("temperature", self.temperature, 0 <= self.temperature <= MAX_TEMPERATURE, "from 0 to 1e30")
        _expect("top_k", self.top_k, self.top_k >= -1, "at least 1, or 0 or -1 for no limit")
        _expect("top_p", self.top_p, 0 <= self.top_p <= 1, "from 0 to 1")
        _expect("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1")
        _expect("presence_penalty", self.presence_penalty, -2 <= self.presence_penalty <= 2, "from -2 to 2")
        _expect("frequency_penalty", self.frequency_penalty, -2 <= self.frequency_penalty <= 2, "from -2 to 2")
        repetition = 0.01 <= self.repetition_penalty <= 100
        _expect("repetition_penalty", self.repetition_penalty, repetition, "from 0.01 to 100")
        for token_id, bias in self.logit_bias:
            _expect("logit_bias", f"{bias} for token {token_id}", -100 <= bias <= 100, "numbers from -100 to 100")
        _expect("seed", self.seed, self.seed is None or 0 <= self.seed <= MAX_SEED, f"from 0 to {MAX_SEED}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def regime(self) -> Regime:
        """The rule that decides which drafts stand: drafts are accepted at another rate under each."""
        return "greedy" if self.greedy else "ratio" if self.seed is None else "coupled"

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0


def _expect(name: str, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {value}, expected {expected}", name)


@dataclass(frozen=True)
class Filters:
    """Per-row temperature and filters, [N] each; None where no row uses that filter."""

    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None

    @classmethod
    def of(cls, params: list[SamplingParams], device: torch.device) -> Filters:
        """Rows of non-greedy requests."""

        def column(values: list[float], off: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
            return None if all(v == off for v in values) else tensor_on(device, values, dtype)

        return cls(
            column([p.temperature for p in params], 1.0),
            column([min(max(p.top_k, 0), MAX_TOP_K) for p in params], 0, torch.int64),
            column([p.top_p for p in params], 1.0),
            column([p.min_p for p in params], 0.0),
        )

    @property
    def _parts(self) -> tuple[Tensor | None, ...]:
        return self.temperature, self.top_k, self.top_p, self.min_p

    @property
    def in_use(self) -> bool:
        """Whether they change anything."""
        return any(part is not None for part in self._parts)

    @property
    def drops_tokens(self) -> bool:
        """Whether they leave tokens out."""
        return any(part is not None for part in self._parts[1:])

    def rows(self, index: Tensor) -> Filters:
        """The filters of the given rows, repeats allowed."""
        return Filters(*(None if part is None else part[index] for part in self._parts))


def probabilities(logits: Tensor, filters: Filters) -> Tensor:
    """The distribution that is sampled from: temperature, then top-k, top-p (on what top-k left), min-p.

    Filters are thresholds on probabilities, so that tokens as likely as the last one kept are kept too. Every sum runs
    inside a row in a fixed order: a row's result does not depend on the rows beside it.

    Args:
        logits: [N, V], any float dtype.

    Returns:
        [N, V] float32, each row summing to 1; the most likely token is always kept.
    """
    return _softmax(filtered(logits, filters), filters.temperature)


def filtered(logits: Tensor, filters: Filters) -> Tensor:
    """Logits in float32 with minus infinity for what the filters leave out: `probabilities` before the softmax."""
    logits = logits.float().contiguous()
    if not filters.drops_tokens:
        return logits
    probs = _softmax(logits, filters.temperature)
    threshold = _ranked_threshold(probs, filters)
    if filters.min_p is not None:
        least = filters.min_p.unsqueeze(-1) * probs.amax(-1, keepdim=True)
        threshold = least if threshold is None else torch.maximum(threshold, least)
    assert threshold is not None
    # Not in place: these may be the caller's own logits.
    return logits.masked_fill(probs < threshold, float("-inf"))


def _softmax(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Softmax of rows divided by their temperatures. The maximum becomes 0 first, so that tiny ones lose no digits."""
    if in_kernels(logits):
        from dspark_core.kernels import rows as kernels  # needs llvmlite

        return kernels.softmax(logits, temperature)
    if temperature is not None:
        logits = (logits - logits.amax(-1, keepdim=True)).div_(temperature.unsqueeze(-1))
    return torch.softmax(logits, -1)


def in_kernels(rows: Tensor) -> bool:
    """Whether our kernels serve these rows; elsewhere torch's operators do."""
    return rows.device.type == "cpu" and rows.dtype == torch.float32 and have_kernels()


def _ranked_threshold(probs: Tensor, filters: Filters) -> Tensor | None:
    """[N, 1] least probability that top-k and top-p keep, or None without such filters."""
    if filters.top_k is None and filters.top_p is None:
        return None
    vocab = probs.shape[-1]
    threshold = torch.zeros_like(probs[:, :1])
    rows = torch.arange(len(probs), device=probs.device)
    # The few most likely tokens often settle it; ranking the whole vocabulary is many times slower.
    for size in (*(s for s in RANKED_SIZES if s < vocab), vocab):
        found, settled = _threshold_among(probs[rows].topk(size, dim=-1).values, filters.rows(rows), vocab)
        threshold[rows] = found
        rows = rows[~settled]
        if not len(rows):
            break
    return threshold


def _threshold_among(ranked: Tensor, filters: Filters, vocab: int) -> tuple[Tensor, Tensor]:
    """Thresholds [N, 1] from the most likely tokens alone, and whether they settle each row [N].

    Args:
        ranked: [N, n] probabilities of the n most likely tokens, descending.
    """
    size = ranked.shape[-1]
    last = torch.full_like(ranked[:, 0], vocab - 1, dtype=torch.int64)  # rank of the last token kept
    total = torch.ones_like(ranked[:, :1])
    cumulative = ranked.cumsum(-1)
    settled = torch.ones_like(last, dtype=torch.bool)
    if filters.top_k is not None:
        limited = (filters.top_k > 0) & (filters.top_k < vocab)
        last = torch.where(limited, filters.top_k - 1, last)
        total = torch.where(limited.unsqueeze(-1), cumulative.gather(-1, last.clamp_max(size - 1).unsqueeze(-1)), total)
        settled &= ~limited | (last < size)
    if filters.top_p is not None:
        below = (cumulative - ranked < filters.top_p.unsqueeze(-1) * total).sum(-1)
        limited = filters.top_p < 1
        settled &= ~limited | (below < size) | (size == vocab)
        last = torch.where(limited, torch.minimum(last, below.clamp_min(1) - 1), last)
    threshold = ranked.gather(-1, last.clamp_max(size - 1).unsqueeze(-1))
    return threshold.masked_fill((last == vocab - 1).unsqueeze(-1), 0.0), settled


def argmax(values: Tensor) -> Tensor:
    """Index of the largest value of each row, the lowest one on a tie. [N, V] to [N]."""
    if values.device.type == "cpu":
        # NumPy promises the first maximum, and is 20 times faster here than torch.argmax.
        return torch.from_numpy((values.float() if values.dtype.itemsize < 4 else values).numpy().argmax(-1))
    ids = torch.arange(values.shape[-1], device=values.device)
    return torch.where(values == values.amax(-1, keepdim=True), ids, values.shape[-1] - 1).amin(-1)
