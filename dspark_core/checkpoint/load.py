"""Building models from checkpoint folders."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_core.checkpoint.weights import assign_weights, read_weights
from dspark_core.config import DecoderConfig, DraftConfig, read_draft_config, read_target_config
from dspark_core.draft.backbone import DraftModel
from dspark_core.errors import CheckpointError
from dspark_core.models.decoder import TargetModel

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# Embeddings of one model before and after fine-tuning stay closer than this; those of different models are unrelated.
SAME_MODEL_COSINE = 0.9


def load_target(folder: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> TargetModel:
    """A target from a Hugging Face style folder, not yet prepared for inference.

    Raises:
        CheckpointError: unsupported configuration, or weights that do not fit it.
    """
    config = read_target_config(folder)
    stored = read_weights(folder)
    weights = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    if len(weights) < len(stored):
        raise CheckpointError(f"{folder}: some tensors are there with and without the leading 'model.', expected one")
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    _tie_head(config, weights, folder)
    with torch.device("meta"):
        model = TargetModel(config)
    assign_weights(model, weights, where=str(folder), dtype=dtype, device=torch.device(device))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval()


def _tie_head(config: DecoderConfig, weights: dict[str, Tensor], folder: Path) -> None:
    """With tied embeddings the head is the embedding; a stored head must then say the same."""
    if not config.tie_word_embeddings or EMBEDDING not in weights:
        return
    head = weights.setdefault(HEAD, weights[EMBEDDING])
    if head is not weights[EMBEDDING] and not torch.equal(head, weights[EMBEDDING]):
        raise CheckpointError(
            f"{folder}: tie_word_embeddings is true but {HEAD} differs from {EMBEDDING}; set it to false"
        )


def load_draft(
    folder: Path, target: TargetModel, *, dtype: torch.dtype | None = None, draft_len: int | None = None
) -> DraftModel:
    """A DeepSpec draft for `target`, not yet prepared for inference.

    `embed_tokens` and `lm_head` are taken from the target when the checkpoint leaves them out, and shared with it when
    they are equal, so that they lie in memory once.

    Args:
        target: loaded, not yet prepared (its LM head must still hold its weights).
        dtype: of the draft's weights; the target's by default.
        draft_len: fewer proposals per block than the checkpoint was trained for.

    Raises:
        CheckpointError: the draft does not fit its own config or belongs to another target.
    """
    config = read_draft_config(folder)
    check_pair(config, target.config, folder)
    if draft_len is not None:
        if not 1 <= draft_len <= config.draft_len:
            raise CheckpointError(
                f"draft_len is {draft_len}, expected 1 to {config.draft_len} (block_size of {folder})"
            )
        config = DraftConfig(**{**config.__dict__, "draft_len": draft_len})
    weights = read_weights(folder)
    dtype = dtype or target.dtype
    own = {EMBEDDING: target.embed_tokens.weight, HEAD: cast(nn.Linear, target.lm_head).weight}
    if EMBEDDING in weights:
        _check_same_model(weights[EMBEDDING], own[EMBEDDING], folder)
    for name, tensor in own.items():
        stored = weights.get(name)
        # A copy rounded to the checkpoint's dtype is still the target's: use the exact one.
        if stored is None or (stored.shape == tensor.shape and torch.equal(stored, tensor.to("cpu", stored.dtype))):
            weights[name] = tensor
    with torch.device("meta"):
        model = DraftModel(config)
    assign_weights(model, weights, where=str(folder), dtype=dtype, device=target.device)
    return model.eval()


def check_pair(draft: DraftConfig, target: DecoderConfig, folder: Path) -> None:
    """Refuse a draft whose sizes say that it was made for another target."""
    sizes = [
        ("vocab_size", draft.decoder.vocab_size, target.vocab_size),
        ("hidden_size", draft.decoder.hidden_size, target.hidden_size),
        ("num_target_layers", draft.num_target_layers, target.num_layers),
    ]
    wrong = [f"{name} is {found}, the target has {expected}" for name, found, expected in sizes if found != expected]
    if wrong:
        raise CheckpointError(f"{folder}: this draft belongs to another target: {'; '.join(wrong)}")


def _check_same_model(stored: Tensor, target: Tensor, folder: Path) -> None:
    """Same sizes can still be another model: compare the embedding copy that the draft carries."""
    if stored.shape != target.shape:
        return  # assign_weights names the shape
    step = max(1, stored.shape[0] // 256)
    cosine = F.cosine_similarity(stored[::step].float(), target[::step].float().cpu(), dim=-1)
    if not cosine.median() >= SAME_MODEL_COSINE:
        raise CheckpointError(
            f"{folder}: this draft belongs to another target: its {EMBEDDING} does not resemble the target's "
            f"(median cosine {cosine.median():.2f}, expected at least {SAME_MODEL_COSINE})"
        )


def shares_head(draft: DraftModel, target: TargetModel) -> bool:
    """Whether draft and target, not yet prepared, hold one LM head in memory."""
    heads = [cast(nn.Linear, model.lm_head).weight for model in (draft, target)]
    return heads[0].data_ptr() == heads[1].data_ptr() and heads[0].shape == heads[1].shape
