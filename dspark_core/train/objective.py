"""The training objective as a module: a batch in, the loss and its statistics out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from dspark_core.draft.backbone import DraftModel
from dspark_core.draft.packed_forward import forward_windows
from dspark_core.losses import LossInputs, LossWeights, SlotTerms, chunked_loss, slot_weights
from dspark_core.train.batches import Batch, Rows

# Columns of Tally.slots.
_COUNT, _CE, _TV, _CONFIDENCE, _ACCEPTANCE, _AGREEMENT, _PREDICTED = range(7)


class Objective(nn.Module):
    """Eq 12 of a draft over a batch.

    Args:
        draft: with embedding and LM head frozen.
        target_head: [V, D] LM head of the target, in the type that logits are computed in; the draft's is a copy.
        feature_scale: [m * D] what features are divided by.
        compute: type of the backbone's matrix products.
    """

    def __init__(
        self,
        draft: DraftModel,
        target_head: Tensor,
        feature_scale: Tensor,
        *,
        loss: LossWeights,
        decay: float,
        chunk: int,
        compute: torch.dtype,
        compile_forward: bool = False,
    ) -> None:
        super().__init__()
        self.draft, self.loss, self.chunk, self.compute = draft, loss, chunk, compute
        # Neither parameters nor part of the draft: not to be wrapped, sharded or saved with it.
        self._head, self._scale = [target_head], [feature_scale]
        self._slot_weights = [slot_weights(draft.config.draft_len, decay).to(target_head.device)]
        self._forward_windows = torch.compile(forward_windows, dynamic=True) if compile_forward else forward_windows

    def weight(self, rows: Rows) -> Tensor:
        """Sum of w_k over supervised slots: the part of the normaliser that is in these rows."""
        mask = rows.windows(self.draft.config.draft_len).eval_mask
        return (self._slot_weights[0].to(mask.device) * mask).sum()

    def forward(self, batch: Batch, normaliser: Tensor, vocab: Tensor | None = None) -> tuple[Tensor, Tally]:
        """Loss of a batch, as its part of a step whose sum of weights is `normaliser`, and statistics.

        Args:
            vocab: ids in ascending order, every label among them: the softmaxes of draft and target are taken over
                these alone. None takes the whole vocabulary, which is the loss as defined.
        """
        rows = batch.rows
        windows = rows.windows(self.draft.config.draft_len)
        anchor_ids = rows.input_ids.gather(1, rows.anchors)
        features = batch.features.float() / self._scale[0]
        with torch.autocast(features.device.type, self.compute, enabled=self.compute != torch.float32):
            output = self._forward_windows(self.draft, features, windows, anchor_ids, rows.sequence_starts)
        mask = windows.eval_mask
        index = windows.target_rows.flatten(1).unsqueeze(-1)
        target_hidden = batch.last_hidden.gather(1, index.expand(-1, -1, batch.last_hidden.shape[-1]))
        head, w2, target_ids = self._head[0], self._markov_w2(), windows.target_ids[mask]
        if vocab is not None:
            head, w2, target_ids = head[vocab], None if w2 is None else w2[vocab], torch.searchsorted(vocab, target_ids)
        inputs = LossInputs(
            hidden=output.hidden[mask],
            latent=None if output.latent is None else output.latent[mask],
            confidence_logits=None if output.confidence_logits is None else output.confidence_logits[mask],
            target_hidden=target_hidden.view(*mask.shape, -1)[mask],
            target_ids=target_ids,
            weights=self._slot_weights[0].expand(mask.shape)[mask] / normaliser.clamp_min(1e-12),
            draft_head=head,
            target_head=head,
            markov_w2=w2,
        )
        total, terms = chunked_loss(inputs, self.loss, self.chunk)
        return total, Tally.of(mask, terms, inputs.confidence_logits)

    def _markov_w2(self) -> Tensor | None:
        head = self.draft.markov_head
        return None if head is None else cast(nn.Linear, head.markov_w2).weight


@dataclass
class Tally:
    """Sums over supervised slots, by slot, and over whole windows. Tallies add up, over batches and ranks.

    Attributes:
        slots: [K, 7] float64: count, ce, tv, confidence loss, c*, agreement, predicted confidence.
        windows: [3] float64: windows supervised to their end; sums of their expected accepted tokens under the ratio
            rule (running products of c*) and under greedy decoding (running products of agreement).
    """

    slots: Tensor
    windows: Tensor

    @classmethod
    def zeros(cls, draft_len: int, device: torch.device) -> Tally:
        slots = torch.zeros(draft_len, 7, dtype=torch.float64, device=device)
        return cls(slots, torch.zeros(3, dtype=torch.float64, device=device))

    @classmethod
    @torch.no_grad()
    def of(cls, mask: Tensor, terms: SlotTerms, confidence_logits: Tensor | None) -> Tally:
        """Statistics of the supervised slots of `mask` [B, N, K]."""
        predicted = torch.zeros_like(terms.ce) if confidence_logits is None else confidence_logits.detach().sigmoid()
        columns = [torch.ones_like(terms.ce), terms.ce, terms.tv, terms.confidence]
        columns += [terms.acceptance, terms.agreement, predicted]
        draft_len = mask.shape[-1]
        tally = cls.zeros(draft_len, mask.device)
        slot = torch.arange(draft_len, device=mask.device).expand(mask.shape)[mask]
        tally.slots.index_add_(0, slot, torch.stack(columns, -1).double())
        whole = mask.all(-1)
        tally.windows[0] = whole.sum()
        for column, values in ((1, terms.acceptance), (2, terms.agreement)):
            dense = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
            dense[mask] = values.double()
            tally.windows[column] = dense[whole].cumprod(-1).sum()
        return tally

    def add(self, other: Tally) -> None:
        self.slots += other.slots
        self.windows += other.windows

    def summary(self, weights: LossWeights, decay: float) -> dict[str, float | list[float]]:
        """What a log line says: each loss term (Eq 9-12), quality by position, expected acceptance lengths."""
        w = slot_weights(len(self.slots), decay).double().to(self.slots.device)
        total = (w * self.slots[:, _COUNT]).sum().clamp_min(1e-12)
        ce, tv, confidence = ((w * self.slots[:, c]).sum() / total for c in (_CE, _TV, _CONFIDENCE))
        count = self.slots[:, _COUNT].clamp_min(1)
        bias = (self.slots[:, _PREDICTED] - self.slots[:, _ACCEPTANCE]).sum() / count.sum()
        lengths = 1 + self.windows[1:] / self.windows[0].clamp_min(1)
        return {
            "loss": float(weights.ce * ce + weights.tv * tv + weights.confidence * confidence),
            "ce": float(ce),
            "tv": float(tv),
            "confidence_loss": float(confidence),
            "confidence_bias": float(bias),
            "expected_acceptance_length": float(lengths[0]),
            "expected_acceptance_length_greedy": float(lengths[1]),
            "acceptance_by_position": (self.slots[:, _ACCEPTANCE] / count).tolist(),
            "agreement_by_position": (self.slots[:, _AGREEMENT] / count).tolist(),
            "positions": float(self.slots[:, _COUNT].sum()),
        }
