"""The objective of a whole batch: the off-by-one gate on what reaches heads and losses, and the vocabulary sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark_core.checkpoint.load import load_draft, load_target
from dspark_core.draft.backbone import DraftModel
from dspark_core.losses import LossInputs, LossWeights
from dspark_core.train import objective as module
from dspark_core.train.batches import Batch, Rows
from dspark_core.train.objective import Objective, Tally
from tests.tiny import tiny_draft_folder, tiny_target_folder

K, LENGTH, ANCHORS = 4, 40, (5, 11, 30)
ROUNDING = 1e-5  # float32 sums in another order


@pytest.fixture
def draft(tmp_path: Path) -> DraftModel:
    target = tiny_target_folder(tmp_path)
    model = load_draft(tiny_draft_folder(tmp_path, target, "rnn", K), load_target(target))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("embed_tokens", "lm_head")))
    return model


def make_objective(draft: DraftModel) -> Objective:
    head = draft.lm_head.weight.detach()
    return Objective(
        draft,
        head,
        torch.full((64,), 2.0),
        loss=LossWeights(),
        decay=K,
        chunk=5,
        compute=torch.float32,
    )


def make_batch(shift: int = 0) -> Batch:
    """Two sequences x[i] = i in one row; the target's state of position i is i in every channel."""
    ids = torch.arange(LENGTH).repeat(1, 2)
    starts = torch.tensor([[0] * LENGTH + [LENGTH] * LENGTH])
    places = torch.tensor([[*ANCHORS, *(LENGTH + p for p in ANCHORS), 0]])
    keep = torch.tensor([[True] * 6 + [False]])
    rows = (ids + shift).unsqueeze(-1).float()
    features, last_hidden = torch.randn(1, 2 * LENGTH, 64), rows.expand(1, -1, 32)
    laid = Rows(ids, torch.ones(1, 2 * LENGTH), starts, places, keep, [(0, 0), (0, LENGTH)], ["a", "b"])
    return Batch(laid, features, last_hidden)


def seen(draft: DraftModel, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> tuple[LossInputs, Tensor]:
    """What the losses were computed from, and the previous tokens that the sequential head embedded."""
    inputs: list[LossInputs] = []
    previous: list[Tensor] = []
    assert draft.markov_head is not None
    chunked, embed = module.chunked_loss, draft.markov_head.embed

    def spy(given: LossInputs, *rest: Any) -> Any:
        inputs.append(given)
        return chunked(given, *rest)

    def embedding(ids: Tensor) -> Tensor:
        previous.append(ids)
        return embed(ids)

    monkeypatch.setattr(module, "chunked_loss", spy)
    monkeypatch.setattr(draft.markov_head, "embed", embedding)
    make_objective(draft)(batch, torch.ones(()))
    return inputs[0], previous[0]


def test_previous_token_label_and_target_row_are_those_of_the_notation(
    draft: DraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, previous = seen(draft, make_batch(), monkeypatch)
    slots = (torch.tensor(ANCHORS * 2).unsqueeze(-1) + torch.arange(K)).flatten()
    assert torch.equal(previous[0, :6].flatten(), slots), "previous token x[p + s]"
    assert torch.equal(inputs.target_ids, slots + 1), "label x[p + s + 1]"
    assert torch.equal(inputs.target_hidden, slots.float().unsqueeze(-1).expand(-1, 32)), "target row p + s"


def test_a_target_one_position_off_is_seen(draft: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the gate."""
    inputs, _ = seen(draft, make_batch(shift=1), monkeypatch)
    assert not torch.equal(inputs.target_hidden[:, 0].long(), inputs.target_ids - 1)


def test_features_are_scaled(draft: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, given = make_batch(), list[Tensor]()
    inject = draft.inject
    monkeypatch.setattr(draft, "inject", lambda features: given.append(features) or inject(features))
    make_objective(draft)(batch, torch.ones(()))
    assert torch.equal(given[0], batch.features / 2)


def gradients(draft: DraftModel, batch: Batch, vocab: Tensor | None) -> tuple[float, dict[str, Tensor]]:
    draft.zero_grad()
    total, _ = make_objective(draft)(batch, torch.ones(()), vocab)
    total.backward()
    return total.item(), {n: p.grad.clone() for n, p in draft.named_parameters() if p.grad is not None}


def test_a_sample_of_all_ids_is_the_loss_itself(draft: DraftModel) -> None:
    batch = make_batch()
    whole, sampled = (gradients(draft, batch, vocab) for vocab in (None, torch.arange(259)))
    assert whole[0] == pytest.approx(sampled[0], rel=ROUNDING)
    assert whole[1].keys() == sampled[1].keys()
    assert all(torch.allclose(whole[1][n], sampled[1][n], atol=ROUNDING) for n in whole[1])


def test_a_sample_takes_the_softmaxes_over_its_ids(draft: DraftModel) -> None:
    """As if the other ids had no logit; and their rows of W2 learn nothing."""
    vocab = torch.arange(0, 120)
    batch = make_batch()
    sampled, grads = gradients(draft, batch, vocab)
    assert grads["markov_head.markov_w2.weight"][:120].any()
    assert not grads["markov_head.markov_w2.weight"][120:].any()
    draft.lm_head.weight = torch.nn.Parameter(draft.lm_head.weight[:120].detach(), requires_grad=False)
    assert draft.markov_head is not None
    draft.markov_head.markov_w2.weight = torch.nn.Parameter(draft.markov_head.markov_w2.weight[:120].detach())
    assert gradients(draft, batch, None)[0] == pytest.approx(sampled, rel=ROUNDING)


def test_tallies_add_up_and_tell_expected_lengths() -> None:
    """Two windows by hand: (0.5, 0.5) and (1, 0.2), one more that is not supervised to its end."""
    mask = torch.tensor([[[True, True], [True, True], [True, False]]])
    acceptance = torch.tensor([0.5, 0.5, 1.0, 0.2, 0.9])
    agreement = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    terms = module.SlotTerms(torch.ones(5), 2 * torch.ones(5), torch.zeros(5), acceptance, agreement)
    tally = Tally.of(mask, terms, torch.zeros(5))
    tally.add(Tally.zeros(2, mask.device))
    summary = tally.summary(LossWeights(), decay=1.0)
    assert summary["acceptance_by_position"] == pytest.approx([0.8, 0.35])
    assert summary["expected_acceptance_length"] == pytest.approx(1 + (0.5 + 0.25 + 1 + 0.2) / 2)
    assert summary["expected_acceptance_length_greedy"] == pytest.approx(1 + (1 + 0 + 1 + 1) / 2)
    assert summary["loss"] == pytest.approx(0.1 + 1.8)
    assert summary["confidence_bias"] == pytest.approx(0.5 - 3.1 / 5)
