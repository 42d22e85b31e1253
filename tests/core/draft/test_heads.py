"""The sequential heads (Eq 4-6) and the confidence head (Eq 7), against their formulas written out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dspark_core.config import DraftConfig, read_draft_config
from dspark_core.draft.heads import ConfidenceHead, GatedHead, MarkovHead, RNNHead, build_markov_head
from tests.tiny import edit_json, tiny_draft_folder, tiny_target_folder

RANK, HIDDEN, VOCAB, ROWS = 6, 32, 83, 5
TOLERANCE = 1e-6  # float32 against float64 on sums of at most 44 terms of size 1


@pytest.fixture
def config(tmp_path: Path) -> DraftConfig:
    return read_draft_config(tiny_draft_folder(tmp_path, tiny_target_folder(tmp_path, vocab_size=VOCAB)))


def build(config: DraftConfig, kind: str) -> MarkovHead:
    head = build_markov_head(replace(config, markov_head_type=kind))
    assert head is not None
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0, 0.5)
    return head


def weight(head: nn.Module, name: str) -> Tensor:
    return head.get_parameter(name).detach().double()


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found.detach().double() - expected).abs().max() < TOLERANCE * expected.abs().max().clamp_min(1))


def test_vanilla_is_a_product_of_two_tables(config: DraftConfig) -> None:
    head = build(config, "vanilla")
    assert type(head) is MarkovHead
    assert head.start(ROWS) is None
    previous = torch.randint(0, VOCAB, (ROWS,))
    latent, state = head.step(head.embed(previous), torch.randn(ROWS, HIDDEN), None)
    bias = head.bias(latent)
    w1, w2 = weight(head, "markov_w1.weight"), weight(head, "markov_w2.weight")
    assert close(bias, torch.stack([w2 @ w1[token] for token in previous]))
    assert state is None


def test_gated_scales_the_embedding_by_a_gate_over_hidden_then_embedding(config: DraftConfig) -> None:
    head = build(config, "gated")
    assert type(head) is GatedHead
    previous, hidden = torch.randint(0, VOCAB, (ROWS,)), torch.randn(ROWS, HIDDEN)
    latent, _ = head.step(head.embed(previous), hidden, head.start(ROWS))
    bias = head.bias(latent)
    w1, w2 = weight(head, "markov_w1.weight"), weight(head, "markov_w2.weight")
    gate_weight, gate_bias = weight(head, "gate_proj.weight"), weight(head, "gate_proj.bias")
    rows = []
    for token, h in zip(previous, hidden.double(), strict=True):
        e = w1[token]
        gate = 1 / (1 + torch.exp(-(gate_weight[:, :HIDDEN] @ h + gate_weight[:, HIDDEN:] @ e + gate_bias)))
        rows.append(w2 @ (gate * e))
    assert close(bias, torch.stack(rows))


def test_rnn_carries_its_state_over_three_positions(config: DraftConfig) -> None:
    head = build(config, "rnn")
    assert type(head) is RNNHead
    tokens, hidden = torch.randint(0, VOCAB, (3, ROWS)), torch.randn(3, ROWS, HIDDEN)
    w1, w2 = weight(head, "markov_w1.weight"), weight(head, "markov_w2.weight")
    joint_weight, joint_bias = weight(head, "joint_proj.weight"), weight(head, "joint_proj.bias")
    state: Tensor | None = head.start(ROWS)
    assert state is not None
    by_hand = torch.zeros(ROWS, RANK, dtype=torch.float64)  # s0 = 0
    assert torch.equal(state.double(), by_hand)
    for k in range(3):
        latent, state = head.step(head.embed(tokens[k]), hidden[k], state)
        bias = head.bias(latent)
        z = torch.cat((by_hand, w1[tokens[k]], hidden[k].double()), -1) @ joint_weight.T + joint_bias
        gate, candidate, output = z[:, :RANK], z[:, RANK : 2 * RANK], z[:, 2 * RANK :]
        keep = 1 / (1 + torch.exp(-gate))
        by_hand = keep * by_hand + (1 - keep) * torch.tanh(candidate)
        assert close(bias, torch.tanh(output) @ w2.T), f"position {k}"
        assert state is not None
        assert close(state, by_hand), f"position {k}"


def test_rank_zero_has_no_head(config: DraftConfig) -> None:
    assert build_markov_head(replace(config, markov_rank=0)) is None


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_packing_keeps_the_bias_and_cuts_the_vocabulary(kind: str, config: DraftConfig) -> None:
    head = build(config, kind)
    embedded, hidden, state = head.embed(torch.tensor([3, 7])), torch.randn(2, HIDDEN), head.start(2)
    with torch.inference_mode():
        latent, _ = head.step(embedded, hidden, state)
        whole = head.bias(latent)
        head.pack("float32", emit_vocab=50)
        cut = head.bias(latent)
    assert cut.shape == (2, 50)
    assert torch.allclose(cut, whole[:, :50], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_confidence_is_one_dot_product_in_float32(dtype: torch.dtype, config: DraftConfig) -> None:
    head = ConfidenceHead(config).to(dtype)
    hidden, embedded = torch.randn(2, 3, HIDDEN, dtype=dtype), torch.randn(2, 3, RANK, dtype=dtype)
    found = head(hidden, embedded)
    assert found.dtype == torch.float32
    features = torch.cat((hidden, embedded), -1).double()
    expected = (features * weight(head, "proj.weight")[0]).sum(-1) + weight(head, "proj.bias")
    assert found.shape == (2, 3)
    assert close(found, expected)


def test_confidence_without_the_markov_feature_reads_hidden_alone(config: DraftConfig) -> None:
    head = ConfidenceHead(replace(config, confidence_with_markov=False))
    assert head.proj.in_features == HIDDEN
    hidden = torch.randn(4, HIDDEN)
    expected = hidden.double() @ weight(head, "proj.weight")[0] + weight(head, "proj.bias")
    for embedded in (None, torch.randn(4, RANK)):
        assert close(head(hidden, embedded), expected)


def test_confidence_width_is_asserted(config: DraftConfig) -> None:
    head = ConfidenceHead(config)
    assert head.proj.in_features == config.confidence_width == HIDDEN + RANK
    with pytest.raises(AssertionError, match="needs the sequential head's embedding"):
        head(torch.randn(4, HIDDEN), None)
    with pytest.raises(AssertionError, match="width"):
        head(torch.randn(4, HIDDEN), torch.randn(4, RANK + 1))
    head.proj = nn.Linear(HIDDEN, 1)
    with pytest.raises(AssertionError, match="width"):
        head(torch.randn(4, HIDDEN), torch.randn(4, RANK))


def test_absent_confidence_with_markov_follows_the_rank(tmp_path: Path) -> None:
    folder = tiny_draft_folder(tmp_path, tiny_target_folder(tmp_path))
    edit_json(folder / "config.json", confidence_head_with_markov=None)
    assert read_draft_config(folder).confidence_width == HIDDEN + RANK
    edit_json(folder / "config.json", markov_rank=0)
    assert read_draft_config(folder).confidence_width == HIDDEN


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_bias_is_added_to_logits_in_place(config: DraftConfig, kind: str) -> None:
    head, latent, logits = build(config, kind), torch.randn(ROWS, RANK), torch.randn(ROWS, VOCAB)
    expected, emit = logits + head.bias(latent), VOCAB - 3
    with torch.inference_mode():
        found = logits.clone()
        head.add_bias_(found, latent)
        torch.testing.assert_close(found, expected)
        head.pack("exact", emit_vocab=emit)
        found = logits[:, :emit].contiguous()
        head.add_bias_(found, latent)
        torch.testing.assert_close(found, expected[:, :emit])
