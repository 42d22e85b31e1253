"""Log-probabilities of emitted tokens, for clients that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark_core.devices import tensor_on
from server.layout import Layout
from server.request import TokenLogprob
from server.scheduler import Work


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int | None) -> list[TokenLogprob] | None:
    """Log-probabilities of emitted tokens under the target, before temperature and filters.

    Args:
        logits: [n, V], rows of the tokens in order; further rows are ignored.
        top: how many alternatives to list, or None for no log-probabilities at all.
    """
    if top is None:
        return None
    scores = torch.log_softmax(logits[: len(tokens)].float(), -1)
    own = scores.gather(-1, tensor_on(scores.device, [[token] for token in tokens]))[:, 0].tolist() if tokens else []
    best = scores.topk(min(top, scores.shape[-1]), dim=-1)
    return [
        TokenLogprob(token, value, tuple(zip(ids, values, strict=True)))
        for token, value, ids, values in zip(tokens, own, best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def score_prompts(work: Sequence[Work], layout: Layout, logits: Tensor) -> None:
    """Give requests the log-probabilities of the prompt tokens that a step's rows foretold.

    Args:
        logits: [sum of counts, V] rows of `layout.prompt_rows`.
    """
    row = 0
    for index, count in layout.prompt_rows:
        request = work[index].request
        first = request.table.kv_len + 1  # the row of a token scores the one after it
        found = token_logprobs(logits[row:], request.prompt_ids[first : first + count], request.params.prompt_logprobs)
        row += count
        # After a pre-emption some are known already.
        request.prompt_logprobs += (found or [])[len(request.prompt_logprobs) - first + 1 :]
