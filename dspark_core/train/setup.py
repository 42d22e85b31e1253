"""From settings to a run that is ready to step: target, data, draft, objective, optimiser."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from dspark_core.checkpoint.files import locked
from dspark_core.checkpoint.fingerprint import fingerprint
from dspark_core.checkpoint.load import load_target
from dspark_core.checkpoint.references import resolve_target
from dspark_core.checkpoint.save import draft_config_json
from dspark_core.checkpoint.tokenizer import Tokenizer
from dspark_core.config import DraftConfig, check_taps
from dspark_core.devices import find_device, find_dtype
from dspark_core.draft.backbone import DraftModel
from dspark_core.errors import CheckpointError
from dspark_core.losses import LossWeights
from dspark_core.models.decoder import TargetModel
from dspark_core.train.batches import Order, VocabSample, choose_anchors
from dspark_core.train.build import FROZEN, build_draft, default_taps, feature_scale, make_config
from dspark_core.train.config import FeaturesConfig, FitConfig
from dspark_core.train.data import Example, load_examples, split_holdout
from dspark_core.train.features import TargetStates, cache_bytes, data_digest, require_space, write_cache
from dspark_core.train.objective import Objective
from dspark_core.train.optimiser import make_optimiser
from dspark_core.train.ranks import Ranks
from dspark_core.train.source import CachedSource, OnlineSource, Source, open_cache

logger = logging.getLogger(__name__)

SCALE_SAMPLES = 64


@dataclass
class Run:
    """What a step needs, and what is written at the end.

    Attributes:
        wrapped: the objective, wrapped for several processes.
        vocab: what the softmaxes are taken over in the first steps, or None.
        training, validation: indices into the source's examples.
        num_steps: of the whole run.
        draft_json: config.json of the draft.
        frozen: embedding and LM head, which the checkpoint may carry.
        identity: what a state of this run belongs to; one of another is refused.
    """

    config: FitConfig
    ranks: Ranks
    source: Source
    training: list[int]
    validation: list[int]
    order: Order
    vocab: VocabSample | None
    objective: Objective
    wrapped: nn.Module
    optimiser: torch.optim.Optimizer
    scale: Tensor
    num_steps: int
    draft_json: dict[str, Any]
    frozen: dict[str, Tensor]
    identity: dict[str, Any]


def prepare_run(config: FitConfig, ranks: Ranks) -> Run:
    """Load and build everything.

    Raises:
        CheckpointError: target, data, cache or initial draft cannot be used, or do not fit each other.
    """
    folder = resolve_target(config.target)
    target = load_target(folder, dtype=find_dtype("auto", ranks.device), device=ranks.device)
    tokenizer = Tokenizer.from_folder(folder)
    source = _open_source(config, folder, target, tokenizer)
    draft_config = make_config(config, target.config, tokenizer, source.target_layer_ids)
    _check_mask_token(draft_config, source.examples)
    draft = build_draft(config, draft_config, target)
    head = cast(nn.Linear, target.lm_head).weight.detach().to(_compute_dtype(config.precision, ranks.device))
    if isinstance(source, OnlineSource):
        target.prepare(max_positions=_limit(config, target))
    training, validation = split_holdout(source.examples, config.holdout, config.seed)
    training = _with_windows(source.examples, training, config)
    scale = _measure_scale(source, training).to(ranks.device)
    with torch.no_grad():
        cast(nn.Linear, draft.fc).weight.mul_(scale if config.init else 1.0)
    frozen = {n: p.detach() for n, p in draft.named_parameters() if n.startswith(FROZEN)}
    objective = _objective(config, draft, head, scale)
    group = config.batch_size * config.accumulation * ranks.size
    return Run(
        config=config,
        ranks=ranks,
        source=source,
        training=training,
        validation=validation,
        order=Order(len(training), group, config.seed),
        vocab=_vocab_sample(config, source.examples, target.config.vocab_size),
        objective=objective,
        wrapped=ranks.wrap(objective, config.sharding),  # before the optimiser: shards are other parameters
        optimiser=make_optimiser(objective.draft, config),
        scale=scale,
        num_steps=config.max_steps or max(1, round(config.epochs * len(training) / group)),
        draft_json=draft_config_json(draft_config, folder, {"num_anchors": config.num_anchors}),
        frozen=frozen,
        identity={
            "target": fingerprint(folder),
            "data": data_digest(source.examples),
            "processes": ranks.size,
            "precision": str(head.dtype).removeprefix("torch."),
        },
    )


def _with_windows(examples: Sequence[Example], training: list[int], config: FitConfig) -> list[int]:
    """The sequences that have something to learn from (case W3); the others are counted."""
    if not training:
        raise CheckpointError(f"holdout of {config.holdout} leaves no sequence of {len(examples)} to train on")
    useful = [index for index in training if len(choose_anchors(examples[index], 0, config))]
    if not useful:
        raise CheckpointError(
            f"none of {len(training)} sequences has a window: expected supervised tokens within max_length "
            f"{config.max_length}" + (f" at multiples of {config.anchor_stride}" if config.anchor_stride else "")
        )
    if len(useful) < len(training):
        logger.warning("%d sequences left out: they have no window", len(training) - len(useful))
    return useful


def _objective(config: FitConfig, draft: DraftModel, head: Tensor, scale: Tensor) -> Objective:
    return Objective(
        draft,
        head,
        scale,
        loss=LossWeights(config.ce_weight, config.tv_weight, config.confidence_weight),
        decay=config.decay,
        chunk=config.chunk_positions,
        compute=head.dtype,
        compile_forward=config.compile,
    )


def _open_source(config: FitConfig, folder: Path, target: TargetModel, tokenizer: Tokenizer) -> Source:
    if config.features:
        name = fingerprint(folder)
        source = CachedSource([open_cache(Path(cache), name) for cache in config.features], config.max_length)
        if config.target_layer_ids not in ((), source.target_layer_ids):
            raise CheckpointError(
                f"{config.features[0]} holds layers {list(source.target_layer_ids)}, "
                f"target_layer_ids is {list(config.target_layer_ids)}"
            )
        return source
    examples = _examples(config, target, tokenizer)
    return OnlineSource(examples, target, config.target_layer_ids or default_taps(target.config.num_layers))


def _examples(config: FitConfig | FeaturesConfig, target: TargetModel, tokenizer: Tokenizer) -> list[Example]:
    return load_examples(
        map(Path, config.data),
        tokenizer,
        vocab_size=target.config.vocab_size,
        max_length=_limit(config, target),
        min_supervised=2,  # an anchor and its first label
    )


def _limit(config: FitConfig | FeaturesConfig, target: TargetModel) -> int:
    """Where sequences are cut."""
    return min(config.max_length, target.config.context_limit)


def _check_mask_token(config: DraftConfig, examples: Sequence[Example]) -> None:
    """The empty slots' token must mean nothing else."""
    for example in examples:
        if config.mask_token_id in example.token_ids:
            raise CheckpointError(
                f"mask_token_id {config.mask_token_id} occurs in the data ({example.id}), expected a token that no "
                "text contains"
            )


def _vocab_sample(config: FitConfig, examples: Sequence[Example], vocab_size: int) -> VocabSample | None:
    if config.loss_vocab is None:
        return None
    labels = {i for e in examples for i, on in zip(e.token_ids, e.supervised, strict=True) if on}
    return VocabSample(torch.tensor(sorted(labels)), vocab_size, config.loss_vocab, config.seed)


def _compute_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _measure_scale(source: Source, training: list[int]) -> Tensor:
    """From sequences spread over the data; the same on every rank."""
    step = max(1, len(training) // SCALE_SAMPLES)
    chosen = training[::step][:SCALE_SAMPLES]
    return feature_scale(states.features for index in chosen for states in source.states([index]))


def cache_features(config: FeaturesConfig) -> Path:
    """`dspark-train features`: compute states of all sequences and write them; says how large it gets first.

    Raises:
        CheckpointError: target or data cannot be used, the disk is too small, or the folder holds something else.
    """
    device = find_device(config.device)
    folder = resolve_target(config.target)
    target = load_target(folder, dtype=find_dtype(config.dtype, device), device=device)
    check_taps(config.target_layer_ids, target.config.num_layers)
    examples = _examples(config, target, Tokenizer.from_folder(folder))
    output = Path(config.output)
    size = cache_bytes(examples, target.config.hidden_size, len(config.target_layer_ids), target.dtype)
    tokens = sum(len(example.token_ids) for example in examples)
    logger.info("%s: %d sequences, %d tokens, %.2f GiB", output, len(examples), tokens, size / 2**30)
    done = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    require_space(output, size - done)
    target.prepare(max_positions=_limit(config, target))
    origin: dict[str, object] = {
        "target": fingerprint(folder),
        "target_layer_ids": list(config.target_layer_ids),
        "dtype": str(target.dtype).removeprefix("torch."),
        "hidden_size": target.config.hidden_size,
    }
    with locked(output):
        write_cache(
            output,
            examples,
            TargetStates(target, config.target_layer_ids),
            origin=origin,
            batch_tokens=config.batch_tokens,
            shard_tokens=config.shard_tokens,
        )
    return output
