"""A draft to be trained: its configuration, its first weights, and what of it learns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from dspark_core.checkpoint.load import load_draft
from dspark_core.checkpoint.tokenizer import Tokenizer
from dspark_core.config import DecoderConfig, DraftConfig, check_taps
from dspark_core.draft.backbone import DraftModel
from dspark_core.errors import CheckpointError
from dspark_core.models.decoder import TargetModel
from dspark_core.models.layers import DecoderLayer
from dspark_core.randomness import derive_key
from dspark_core.train.config import FitConfig

FROZEN = ("embed_tokens.", "lm_head.")
NUM_TAPS = 5
_INIT_STD = 0.02
_W1_RMS = 0.5


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Five layers, evenly spaced from the second to the third from the end, as the published drafts have them."""
    first, last = min(1, num_layers - 2), max(num_layers - 3, 0)
    count = min(NUM_TAPS, max(last - first + 1, 1))
    step = (last - first) / max(count - 1, 1)
    return tuple(dict.fromkeys(round(first + k * step) for k in range(count)))


def make_config(config: FitConfig, target: DecoderConfig, tokenizer: Tokenizer, taps: tuple[int, ...]) -> DraftConfig:
    """The draft that the settings ask for.

    Raises:
        CheckpointError: taps or the mask token do not fit the target.
    """
    check_taps(taps, target.num_layers)
    decoder = replace(
        target,
        family="qwen3",
        num_layers=config.num_layers,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=True,
        tie_word_embeddings=False,
        sliding_window=None,
    )
    with_markov = config.confidence_head_with_markov and config.markov_rank > 0
    return DraftConfig(
        decoder=decoder,
        draft_len=config.draft_len,
        target_layer_ids=taps,
        num_target_layers=target.num_layers,
        mask_token_id=_mask_token(config.mask_token_id, target.vocab_size, tokenizer.vocab_size),
        markov_rank=config.markov_rank,
        markov_head_type=config.markov_head_type,
        enable_confidence_head=config.enable_confidence_head,
        confidence_with_markov=with_markov,
        target_name=config.target if config.target.count("/") == 1 and not Path(config.target).exists() else None,
    )


def _mask_token(asked: int | None, vocab_size: int, known: int) -> int:
    token = known if asked is None else asked
    if asked is None and token >= vocab_size:
        raise CheckpointError(
            f"mask_token_id is not given, and the embedding of {vocab_size} rows has none that the tokenizer leaves "
            "free; give the id of a token that no text contains, such as a reserved one"
        )
    if not 0 <= token < vocab_size:
        raise CheckpointError(f"mask_token_id is {token}, expected an id of the target, 0 to {vocab_size - 1}")
    return token


def build_draft(config: FitConfig, draft_config: DraftConfig, target: TargetModel) -> DraftModel:
    """A draft with its first weights, float32, embedding and LM head shared with the target and frozen.

    Args:
        target: loaded, not yet prepared.

    Raises:
        CheckpointError: `config.init` names a draft of another shape.
    """
    if config.init is not None:
        draft = load_draft(Path(config.init), target, dtype=torch.float32)
        _check_init(config.init, draft, draft_config, target)
    else:
        draft = DraftModel(draft_config)
        _initialise(draft, config.seed)
        _initialise_head(draft, target.embed_tokens.weight.detach().float(), config.seed)
        draft.embed_tokens.weight = nn.Parameter(target.embed_tokens.weight.detach().float())
        draft.lm_head.weight = nn.Parameter(cast(nn.Linear, target.lm_head).weight.detach().float())
        if config.init_layers == "target":
            _copy_layers(draft, target)
    draft = draft.to(target.device)
    for name, parameter in draft.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    return draft.train()


# What two drafts of one target may say differently and still be the same model.
_WORDS = {"target_name", "eos_token_ids", "max_position_embeddings", "tie_word_embeddings"}


def _check_init(where: str, draft: DraftModel, expected: DraftConfig, target: TargetModel) -> None:
    for found, wanted in ((draft.config, expected), (draft.config.decoder, expected.decoder)):
        for name, value in vars(wanted).items():
            if name not in _WORDS | {"decoder"} and getattr(found, name) != value:
                raise CheckpointError(f"init {where}: {name} is {getattr(found, name)}, the settings say {value}")
    heads = (draft.embed_tokens.weight, target.embed_tokens.weight), (draft.lm_head.weight, target.lm_head.weight)
    if not all(torch.equal(cast(Tensor, own), cast(Tensor, theirs).float()) for own, theirs in heads):
        raise CheckpointError(
            f"init {where}: its embedding or LM head is not the target's, with which drafts are trained"
        )


def _initialise(draft: DraftModel, seed: int) -> None:
    """Normal weights of the usual size; norms at one, biases at zero."""
    generator = torch.Generator().manual_seed(derive_key("weights", seed))
    for name, parameter in draft.named_parameters():
        if name.startswith(FROZEN):
            continue
        if parameter.dim() == 1:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
        else:
            std = parameter.shape[1] ** -0.5 if name.startswith("fc.") else _INIT_STD
            nn.init.normal_(parameter, std=std, generator=generator)


def _initialise_head(draft: DraftModel, embedding: Tensor, seed: int) -> None:
    """Start W1 as a random projection of the target's embedding, and W2 at zero.

    Tokens that are alike then share what they teach W2 from the first step on; from small noise each row of W1 would
    have to be learnt alone, and most tokens are seen rarely.
    """
    if draft.markov_head is None:
        return
    generator = torch.Generator().manual_seed(derive_key("markov", seed))
    projection = torch.randn(embedding.shape[1], draft.markov_head.rank, generator=generator)
    rows = nn.functional.normalize(embedding, dim=-1) @ projection.to(embedding.device)
    with torch.no_grad():
        draft.markov_head.markov_w1.weight.copy_(_W1_RMS * rows)
        cast(nn.Linear, draft.markov_head.markov_w2).weight.zero_()


def _copy_layers(draft: DraftModel, target: TargetModel) -> None:
    """Start layer i of the draft as one of the target's, evenly spaced; query-key norms start at one."""
    count, total = len(draft.layers), len(target.layers)
    for i, layer in enumerate(draft.layers):
        place = max(round((i + 1) * total / count) - 1, 0)
        source = cast(DecoderLayer, target.layers[place]).state_dict()
        own = layer.state_dict()
        layer.load_state_dict({name: source.get(name, tensor).float() for name, tensor in own.items()})


def feature_scale(samples: Iterable[Tensor]) -> Tensor:
    """Root mean square of every channel of the tapped features, [m * D], from samples [T, m * D].

    Raw features differ by an order of magnitude between layers and have outlier channels, which makes one learning
    rate wrong for most of `fc`. Training sees features divided by this, and the checkpoint's `fc` has it folded in.
    """
    total, squares = 0, torch.zeros(1, dtype=torch.float64)
    for sample in samples:
        total += len(sample)
        squares = squares + sample.double().square().sum(0).cpu()
    return (squares / total).sqrt().clamp_min(1e-6).float()
