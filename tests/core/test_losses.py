"""The losses in chunks against the same losses written out, their memory, and what must never make them NaN."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from dspark_core.losses import (
    LossInputs,
    LossWeights,
    SlotTerms,
    chunked_loss,
    confidence_loss,
    slot_terms,
    slot_weights,
)
from tests.reference_training import compare_losses, loss_values, loss_weights

GEMMA = Path(__file__).parent.parent / "data" / "golden-losses" / "gemma4-vanilla"
SLOTS, VOCAB, WIDTH, RANK = 24, 50, 8, 4
WEIGHTINGS = [LossWeights(), LossWeights(1, 0, 0), LossWeights(0, 1, 0), LossWeights(0, 0, 1), LossWeights(0.3, 2, 0.5)]
# The same float32 sums, of at most some 50 terms of size 1 to 10, in another order.
assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


def random_leaves(
    slots: int = SLOTS, vocab: int = VOCAB, *, head: bool = True, confidence: bool = True
) -> dict[str, Tensor]:
    """What is trained: the draft's hidden states, the sequential head's two tables, the confidence logits."""
    leaves = {"hidden": torch.randn(slots, WIDTH)}
    if head:
        leaves |= {"w1": torch.randn(vocab, RANK), "w2": torch.randn(vocab, RANK)}
    if confidence:
        leaves["confidence"] = 2 * torch.randn(slots)
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}


def make_inputs(leaves: dict[str, Tensor], vocab: int = VOCAB) -> LossInputs:
    """One latent row is read by several slots, as a token is."""
    hidden = leaves["hidden"]
    slots = hidden.shape[0]
    generator = torch.Generator().manual_seed(1)
    previous = torch.randint(0, 7, (slots,), generator=generator)
    weights = slot_weights(4, 4.0).repeat(slots)[:slots]
    return LossInputs(
        hidden=hidden,
        latent=leaves["w1"][previous] if "w1" in leaves else None,
        confidence_logits=leaves.get("confidence"),
        target_hidden=torch.randn(slots, WIDTH, generator=generator),
        target_ids=torch.randint(0, vocab, (slots,), generator=generator),
        weights=weights / weights.sum(),
        draft_head=torch.randn(vocab, WIDTH, generator=generator),
        target_head=torch.randn(vocab, WIDTH, generator=generator),
        markov_w2=leaves.get("w2"),
    )


def written_out(inputs: LossInputs, loss: LossWeights) -> tuple[Tensor, SlotTerms]:
    """What `chunked_loss` has to equal."""
    logits = inputs.hidden @ inputs.draft_head.T
    if inputs.latent is not None and inputs.markov_w2 is not None:
        logits = logits + inputs.latent @ inputs.markov_w2.T
    target_logits = inputs.target_hidden @ inputs.target_head.T
    terms = slot_terms(logits, target_logits, inputs.target_ids, inputs.confidence_logits)
    return terms.total(inputs.weights, loss), terms


def gradients(total: Tensor, leaves: dict[str, Tensor]) -> list[Tensor]:
    """Of thrice the total, so that what comes from above is not 1; None counts as zeros."""
    grads = torch.autograd.grad(3 * total, list(leaves.values()), retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves.values(), strict=True)]


@pytest.mark.parametrize("loss", WEIGHTINGS, ids=lambda loss: f"{loss.ce}-{loss.tv}-{loss.confidence}")
@pytest.mark.parametrize(("head", "confidence"), [(True, True), (False, True), (True, False), (False, False)])
def test_chunks_equal_the_losses_written_out(loss: LossWeights, head: bool, confidence: bool) -> None:
    """Case W10: also without a confidence head, and where terms count for nothing."""
    leaves = random_leaves(head=head, confidence=confidence)
    inputs = make_inputs(leaves)
    expected, terms = written_out(inputs, loss)
    expected_grads = gradients(expected, leaves)
    for chunk in (1, 7, 8, SLOTS, 100):
        total, parts = chunked_loss(inputs, loss, chunk)
        assert_close(total, expected)
        for field in fields(SlotTerms):
            found = getattr(parts, field.name)
            assert not found.requires_grad
            assert_close(found, getattr(terms, field.name).detach())
        assert_close(gradients(total, leaves), expected_grads)
    nothing = not confidence and loss.ce == loss.tv == 0
    assert any(grad.any() for grad in expected_grads) != nothing


class Wide(TorchDispatchMode):
    """Notes the tensors that have one axis of the vocabulary's size: rows of the largest, and matrix products."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.rows, self.products = vocab, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and self.vocab in tensor.shape:
                self.rows = max(self.rows, tensor.numel() // self.vocab)
                self.products += func is torch.ops.aten.mm.default and tensor.shape[-1] == self.vocab
        return result


def test_logits_exist_for_one_chunk_at_a_time() -> None:
    """Of draft and target, forward and backward; and they are made once."""
    leaves, chunk = random_leaves(), 10  # wider than WIDTH and RANK, which the heads have as rows
    inputs = make_inputs(leaves)
    with Wide(VOCAB) as chunked:
        gradients(chunked_loss(inputs, LossWeights(), chunk)[0], leaves)
    assert chunked.rows == chunk
    assert chunked.products == 3 * 3, "3 chunks: the draft's logits, the head's bias, the target's logits"
    with Wide(VOCAB) as whole:
        gradients(written_out(inputs, LossWeights())[0], leaves)
    assert whole.rows == SLOTS, "the spy sees wide tensors"


def test_without_gradients_the_values_are_the_same() -> None:
    """As in validation: to the last bit, and no product is made for a gradient."""
    inputs = make_inputs(random_leaves())
    expected, terms = chunked_loss(inputs, LossWeights(), 10)
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        total, parts = chunked_loss(inputs, LossWeights(), 10)
    assert flops.get_total_flops() == 2 * SLOTS * VOCAB * (WIDTH + RANK + WIDTH), "logits, bias, the target's logits"
    assert (total, total.requires_grad) == (expected, False)
    assert all(torch.equal(getattr(parts, f.name), getattr(terms, f.name)) for f in fields(SlotTerms))


def test_a_wide_vocabulary() -> None:
    vocab = 150_000
    leaves = random_leaves(3, vocab)
    inputs = make_inputs(leaves, vocab)
    (total, _), (expected, _) = chunked_loss(inputs, LossWeights(), 2), written_out(inputs, LossWeights())
    # torch sums rows of this length in blocks, so that the error stays that of short sums.
    assert_close(total, expected)
    # Terms of size 1e-5 that mostly cancel, and the sign of some gaps is rounding: both are 6e-5 from float64.
    assert_close(gradients(total, leaves), gradients(expected, leaves), atol=5e-5)


@pytest.mark.parametrize("make", [chunked_loss, written_out])
def test_no_slot_is_a_zero_with_zero_gradients(make: Callable[[LossInputs, LossWeights], Any]) -> None:
    """Case W2. The weights are 0 / 0 slots there: an empty tensor."""
    leaves = random_leaves(0) | {"w1": torch.randn(VOCAB, RANK, requires_grad=True)}
    total, _ = make(make_inputs(leaves), LossWeights())
    assert total.item() == 0
    grads = torch.autograd.grad(total, list(leaves.values()))
    assert all(grad.shape == leaf.shape and not grad.any() for grad, leaf in zip(grads, leaves.values(), strict=True))


@pytest.mark.parametrize("make", [chunked_loss, written_out])
def test_huge_logits_stay_finite(make: Callable[[LossInputs, LossWeights], Any]) -> None:
    leaves = random_leaves()
    with torch.no_grad():
        leaves["hidden"] *= 1e4
        leaves["confidence"] *= 1e4
    inputs = make_inputs(leaves)
    total, _ = make(replace(inputs, target_hidden=inputs.target_hidden * -1e4), LossWeights())
    assert total.isfinite()
    assert total > 1e3
    assert all(grad.isfinite().all() for grad in gradients(total, leaves))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_confidence_loss_is_bounded_by_the_logit(dtype: torch.dtype) -> None:
    """Case W9: from a probability that rounded to 0 or 1 it would be infinite, in bfloat16 already at logit 9."""
    size = float(torch.tensor(1e4, dtype=dtype))
    logits = torch.tensor([size, size, -size, -size], dtype=dtype, requires_grad=True)
    losses = confidence_loss(logits, torch.tensor([0.0, 1.0, 0.0, 1.0]))
    assert losses.dtype == torch.float32
    assert losses.tolist() == [size, 0, 0, size]
    losses.sum().backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [1, 0, 0, -1]


def test_bfloat16_heads_are_close_to_float32() -> None:
    """All inputs are bfloat16 numbers, so that products differ by the rounding of logits and slopes alone."""
    leaves = {n: leaf.detach().bfloat16().float().requires_grad_() for n, leaf in random_leaves().items()}
    inputs = make_inputs(leaves)
    heads = {name: getattr(inputs, name).bfloat16() for name in ("draft_head", "target_head")}
    inputs = replace(inputs, **{name: head.float() for name, head in heads.items()})
    inputs = replace(inputs, target_hidden=inputs.target_hidden.bfloat16().float())
    loss = LossWeights(1, 0, 1)  # the gradient of tv has a kink where both are alike, and rounding picks the side
    total, parts = chunked_loss(replace(inputs, **heads), loss, 7)
    expected, terms = chunked_loss(inputs, loss, 7)
    # Half a unit in the last of 8 places, of base logits and of a bias that are both below 16. An error e of logits
    # moves cross-entropy by 2 e at most, and by 2 e in L1 each of the two distributions.
    error = 2**-9 * (16 + 16)
    assert 0 < (parts.ce - terms.ce).abs().max() < 2 * error
    assert 0 < (parts.tv - terms.tv).abs().max() < 4 * error
    for found, grad in zip(gradients(total, leaves), gradients(expected, leaves), strict=True):
        assert found.dtype == torch.float32
        # Probabilities off by a factor of 1 + 2 e at most and by less in the mean, slopes by 2^-9 more.
        assert (found - grad).norm() < error * grad.norm()


def test_slot_weights_decay_from_one() -> None:
    expected = [1, 0.867, 0.751, 0.651, 0.565, 0.490, 0.424]
    assert slot_weights(7, 7.0).tolist() == pytest.approx(expected, abs=5e-4)  # given to three places
    assert slot_weights(7, None).tolist() == [1] * 7


@pytest.mark.parametrize("make", [chunked_loss, written_out])
def test_parts_of_a_batch_add_up_under_one_normaliser(make: Callable[[LossInputs, LossWeights], Any]) -> None:
    """Micro-batches and ranks of any size: a mean over each one's own slots would weigh short ones more."""
    inputs = make_inputs(random_leaves())
    names = ("hidden", "latent", "confidence_logits", "target_hidden", "target_ids", "weights")
    pieces = [
        replace(inputs, **{name: getattr(inputs, name)[rows] for name in names})
        for rows in (slice(0, 5), slice(5, 5), slice(5, SLOTS))
    ]
    whole, parts = make(inputs, LossWeights())
    assert_close(sum(make(piece, LossWeights())[0] for piece in pieces), whole)
    by_hand = (0.1 * parts.ce + 0.9 * parts.tv + parts.confidence).tolist()
    weights = [torch.exp(torch.tensor(-(slot % 4) / 4)).item() for slot in range(SLOTS)]
    mean = sum(w * x for w, x in zip(weights, by_hand, strict=True)) / sum(weights)
    assert whole.item() == pytest.approx(mean, rel=1e-5)  # float32 sums of 24 terms


def test_losses_of_a_golden_folder_from_its_tensors() -> None:
    """A family that the models do not cover: from the reference's own logits, soft-capped, to its losses."""
    train = load_file(GEMMA / "train.safetensors")
    expected = json.loads((GEMMA / "expected.json").read_text())["losses"].values()
    mask = train["eval_mask"]
    names = ("draft_logits", "aligned_target_logits", "target_ids", "confidence_logits")
    terms = slot_terms(*(train[name][mask] for name in names))
    found = []
    for values in expected:
        weights = slot_weights(mask.shape[-1], values["decay"]).expand_as(mask)[mask]
        found.append(loss_values(terms, weights, terms.total(weights / weights.sum(), loss_weights(values))))
    checks = list(compare_losses(found, list(expected)))
    assert len(found) == 6
    assert [str(check) for check in checks if not check.ok] == []
