"""Slow references that read like their definitions, and a tabular world small enough to know every probability."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from dspark_core.adjustments import RowSource
from dspark_core.sampler import Round
from dspark_core.sampling import SamplingParams

START = 0  # the prompt of the tabular world is this one token
CPU = torch.device("cpu")


def slow_probabilities(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p on what top-k left, min-p, each spelled out in float64."""
    top = max(logits)
    weights = [math.exp((x - top) / params.temperature) for x in logits]
    probs = [w / sum(weights) for w in weights]
    ranked = sorted(probs, reverse=True)
    least = 0.0
    kept = ranked[: params.top_k] if params.top_k > 0 else ranked
    if params.top_k > 0:
        least = kept[-1]
    if params.top_p < 1:
        mass, size = 0.0, 0
        while size == 0 or (size < len(kept) and mass < params.top_p * sum(kept)):
            mass += kept[size]
            size += 1
        least = kept[size - 1]
    least = max(least, params.min_p * ranked[0])
    filtered = [p if p >= least else 0.0 for p in probs]
    return [p / sum(filtered) for p in filtered]


def slow_penalties(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Repetition for tokens of prompt and output, then frequency and presence for tokens of the output."""
    result = list(logits)
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
    for token in set(output):
        result[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return result


def exact_joint(target: Tensor, params: SamplingParams, num_tokens: int) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of `num_tokens` tokens under plain sampling. `target`: [V, V] logits."""
    rows, vocab = target.tolist(), len(target)
    joint = {}
    for sequence in itertools.product(range(vocab), repeat=num_tokens):
        probability = 1.0
        for place, token in enumerate(sequence):
            previous, output = (sequence[place - 1] if place else START), sequence[:place]
            logits = slow_penalties(rows[previous], params, [START], list(output))
            probability *= slow_probabilities(logits, params)[token]
        joint[sequence] = probability
    return joint


@dataclass(frozen=True)
class Played:
    """Tokens [R, n] of every request; rounds with drafts, and accepted tokens, summed over requests."""

    tokens: Tensor
    rounds: int
    accepted: int


def play(
    target: Tensor,
    draft: Tensor,
    params: Sequence[SamplingParams],
    keys: Sequence[int],
    *,
    num_tokens: int,
    draft_len: int,
    choose_lens: Callable[[Tensor], list[int]] | None = None,
) -> Played:
    """Speculative decoding of R requests by `Round`, where the next token depends on the last one alone.

    Args:
        target, draft: [V, V] logits; row t is what follows token t.
        choose_lens: verify lengths from the drafted ids [R, K]; the full block by default.
    """
    texts: list[list[int]] = [[] for _ in params]
    rounds = accepted = number = 0
    while active := [i for i, text in enumerate(texts) if len(text) < num_tokens]:
        sources = [
            RowSource(params[i], keys[i], number, position=1 + len(texts[i]), prompt_ids=[START], output_ids=texts[i])
            for i in active
        ]
        last = torch.tensor([texts[i][-1] if texts[i] else START for i in active])
        this = Round(sources, CPU)
        number += 1
        if not draft_len:
            for i, token in zip(active, this.next_ids(target[last]).tolist(), strict=True):
                texts[i].append(token)
            continue
        previous, ids = last, last.new_empty(len(active), 0)
        for slot in range(draft_len):
            previous = this(slot, draft[previous], ids)
            ids = torch.cat((ids, previous.unsqueeze(-1)), -1)
        lens = choose_lens(ids) if choose_lens else [draft_len] * len(active)
        shown = torch.cat((last.unsqueeze(-1), ids), -1)
        rows = torch.arange(draft_len + 1) <= torch.tensor(lens).unsqueeze(-1)
        verified = this.verify(target[shown[rows]], ids, lens)
        for place, i in enumerate(active):
            count = int(verified.num_accepted[place])
            texts[i] += [*ids[place, :count].tolist(), int(verified.next_ids[place])]
        rounds += len(active)
        accepted += int(verified.num_accepted.sum())
    return Played(torch.tensor([text[:num_tokens] for text in texts]), rounds, accepted)


def chi_square_p(tokens: Tensor, joint: dict[tuple[int, ...], float]) -> float:
    """Probability of counts at least as far from `joint` as those of `tokens` [R, n]; 0 if the impossible happened.

    Outcomes expected less than 5 times are pooled, as the chi-square approximation asks.
    """
    found: dict[tuple[int, ...], int] = dict.fromkeys(joint, 0)
    for sequence in map(tuple, tokens.tolist()):
        found[sequence] += 1
    if any(found[s] for s, p in joint.items() if p == 0):
        return 0.0
    counts, expected, rare_count, rare_expected = [], [], 0, 0.0
    for sequence, probability in joint.items():
        mean = probability * len(tokens)
        if mean >= 5:
            counts.append(found[sequence])
            expected.append(mean)
        else:
            rare_count += found[sequence]
            rare_expected += mean
    if rare_expected:
        counts.append(rare_count)
        expected.append(rare_expected)
    statistic = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    return float(stats.chi2.sf(statistic, len(counts) - 1))
