"""Log-probabilities of emitted tokens, for clients that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from server.request import TokenLogprob


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int | None) -> list[TokenLogprob] | None:
    """Log-probabilities of emitted tokens under the target, before temperature and filters.

    Args:
        logits: [n, V], rows of the tokens in order; further rows are ignored.
        top: how many alternatives to list, or None for no log-probabilities at all.
    """
    if top is None:
        return None
    scores = torch.log_softmax(logits[: len(tokens)].float(), -1)
    best = scores.topk(top, dim=-1)
    return [
        TokenLogprob(token, row[token].item(), tuple(zip(ids, values, strict=True)))
        for token, row, ids, values in zip(tokens, scores, best.indices.tolist(), best.values.tolist(), strict=True)
    ]
