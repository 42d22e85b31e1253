"""What a request may ask of the model: checked before it is taken."""

from __future__ import annotations

from collections.abc import Sequence

from dspark_core.errors import RequestError
from server.request import RequestParams

TOO_LONG = "context_length_exceeded"


def check_limits(prompt_ids: Sequence[int], params: RequestParams, *, vocab_size: int, limit: int) -> None:
    """Raise RequestError if ids lie outside the vocabulary or prompt and completion do not fit into the context.

    Args:
        vocab_size: ids below this exist.
        limit: tokens that the context holds.
    """
    size = len(prompt_ids)
    if not prompt_ids:
        raise RequestError("the prompt is empty, expected at least one token", "prompt")
    biased = [token_id for token_id, _ in params.sampling.logit_bias]
    for field_name, ids in (
        ("prompt_ids", prompt_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", biased),
    ):
        if bad := [i for i in ids if not 0 <= i < vocab_size]:
            expected = f"expected 0 to {vocab_size - 1}"
            raise RequestError(f"{field_name}: {bad[0]} is outside the vocabulary, {expected}", field_name)
    if size >= limit:
        raise RequestError(
            f"the prompt has {size} tokens, expected at most {limit - 1}: the context holds {limit} tokens, "
            "prompt and completion together",
            "prompt",
            TOO_LONG,
        )
    most = limit - size if params.max_tokens is None else params.max_tokens
    if params.min_tokens > most:
        what = "what the context leaves" if params.max_tokens is None else "max_tokens"
        expected = f"expected at most {what}, which is {most}"
        raise RequestError(f"min_tokens is {params.min_tokens}, {expected}", "min_tokens")
    if params.max_tokens is not None and size + params.max_tokens > limit:
        raise RequestError(
            f"max_tokens is {params.max_tokens} with a prompt of {size} tokens, {size + params.max_tokens} in all; "
            f"the context holds {limit}",
            "max_tokens",
            TOO_LONG,
        )
