"""What `dspark-train features` and `fit` can be told; flags, files and presets all fill these fields."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from dspark_core.settings import DtypeName, Settings, setting

FEATURES_GROUPS = {"files": "files", "target": "the target's forward pass"}
FIT_GROUPS = {
    "files": "files",
    "draft": "the draft",
    "windows": "training windows",
    "loss": "the loss (Eq 8-12)",
    "optimiser": "the optimiser",
    "run": "the run",
}


class FeaturesConfig(Settings):
    """Everything `dspark-train features` can be told."""

    target: str = setting("demo", "files", "target: a local folder, a hub id or 'demo'", min_length=1)
    data: tuple[str, ...] = setting(..., "files", "JSONL files: answers of `generate`, or finished conversations")
    output: str = setting(..., "files", "folder for the cache", min_length=1)
    target_layer_ids: tuple[int, ...] = setting(
        ..., "target", "layers whose outputs the draft reads, 0-based; -1 is the embedding output", min_length=1
    )
    max_length: int = setting(
        4096, "target", "longer sequences are cut here, or at the target's context limit, in tokens", ge=2
    )
    batch_tokens: int = setting(2048, "target", "tokens in one pass of the target", ge=1)
    shard_tokens: int = setting(65536, "files", "tokens in one file of the cache", ge=1)
    dtype: DtypeName = setting("auto", "target", "number type of the target; auto: float32 on a CPU")
    device: str = setting("auto", "target", "cpu, cuda, cuda:N or auto", min_length=1)


class FitConfig(Settings):
    """Everything `dspark-train fit` can be told."""

    target: str = setting("demo", "files", "target: a local folder, a hub id or 'demo'", min_length=1)
    data: tuple[str, ...] = setting((), "files", "JSONL files; features are then computed as they are needed")
    features: tuple[str, ...] = setting((), "files", "caches of `dspark-train features`, instead of data")
    output: str = setting(..., "files", "folder for the draft and the run; a run that is there is resumed")
    init: str | None = setting(None, "files", "draft to start from instead of a fresh one", min_length=1)
    save_embeddings: bool = setting(
        True, "files", "write the embedding and LM head into the checkpoint, as DeepSpec does; our server needs neither"
    )
    save_dtype: Literal["float32", "bfloat16"] = setting("bfloat16", "files", "number type of the written weights")

    draft_len: int = setting(7, "draft", "proposals per block (K)", ge=1)
    num_layers: int = setting(5, "draft", "decoder layers of the backbone", ge=1)
    target_layer_ids: tuple[int, ...] = setting(
        (), "draft", "layers whose outputs the draft reads; unset: five, evenly spaced, or the cache's"
    )
    mask_token_id: int | None = setting(
        None, "draft", "token of the empty slots, one that no text contains; unset: the first id past the tokenizer's"
    )
    markov_rank: int = setting(256, "draft", "rank of the sequential head; 0 is DFlash", ge=0)
    markov_head_type: Literal["vanilla", "gated", "rnn"] = setting("vanilla", "draft", "kind of sequential head")
    enable_confidence_head: bool = setting(True, "draft", "train a confidence head")
    confidence_head_with_markov: bool = setting(True, "draft", "let it see the previous token (ignored with rank 0)")
    init_layers: Literal["random", "target"] = setting(
        "random", "draft", "start a fresh backbone's layers at random, or as copies of the target's"
    )

    max_length: int = setting(
        4096, "windows", "longer sequences are cut here, or at the target's context limit, in tokens", ge=2
    )
    num_anchors: int = setting(512, "windows", "windows per sequence, placed at random (section 3.3)", ge=1)
    anchor_stride: int | None = setting(None, "windows", "place windows every so many tokens instead", ge=1)
    row_tokens: int | None = setting(
        None, "windows", "put sequences end to end in rows of this many tokens; unset: one sequence a row", ge=2
    )

    ce_weight: float = setting(0.1, "loss", "weight of the cross entropy", ge=0)
    tv_weight: float = setting(0.9, "loss", "weight of the L1 distance of the probabilities", ge=0)
    confidence_weight: float = setting(1.0, "loss", "weight of the confidence loss", ge=0)
    loss_decay: float | None = setting(None, "loss", "decay of the slots' weights, in slots; unset: draft_len", gt=0)
    loss_vocab: int | None = setting(
        None,
        "loss",
        "take the softmaxes over so many ids, those of the data and random others: faster, and not quite the loss",
        ge=2,
    )
    loss_vocab_share: float = setting(
        0.8, "loss", "share of the steps that do so; the last ones take all ids", ge=0, le=1
    )
    chunk_positions: int = setting(128, "loss", "positions whose logits exist at once", ge=1)

    lr: float = setting(6e-4, "optimiser", "highest learning rate", gt=0)
    min_lr_ratio: float = setting(0.02, "optimiser", "last learning rate as a share of the highest", ge=0, le=1)
    head_lr_scale: float = setting(1.0, "optimiser", "factor on the rate of sequential and confidence heads", gt=0)
    warmup_ratio: float = setting(0.04, "optimiser", "share of the steps in which the rate rises", ge=0, lt=1)
    max_steps: int | None = setting(None, "optimiser", "optimiser steps; unset: as many as the epochs make", ge=1)
    epochs: int = setting(10, "optimiser", "passes over the data, if max_steps is unset", ge=1)
    batch_size: int = setting(1, "optimiser", "sequences in one forward pass of one process", ge=1)
    accumulation: int = setting(1, "optimiser", "forward passes per step", ge=1)
    weight_decay: float = setting(0.0, "optimiser", "AdamW's decay of matrices", ge=0)
    beta1: float = setting(0.9, "optimiser", "AdamW's decay of the mean", ge=0, lt=1)
    beta2: float = setting(0.98, "optimiser", "AdamW's decay of the square", ge=0, lt=1)
    clip: float = setting(1.0, "optimiser", "largest norm of the gradient", gt=0)

    seed: int = setting(0, "run", "seed of weights, order and windows", ge=0)
    holdout: float = setting(0.02, "run", "share of the prompts kept for validation", ge=0, lt=1)
    log_every: int = setting(10, "run", "steps between lines of the log", ge=1)
    eval_every: int = setting(500, "run", "steps between validations", ge=1)
    save_every: int = setting(500, "run", "steps between checkpoints", ge=1)
    keep: int = setting(2, "run", "checkpoints of the run that are kept", ge=1)
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "run", "of matrix products (weights stay float32); auto: bfloat16 on CUDA, float32 on a CPU"
    )
    compile: bool = setting(False, "run", "compile the forward pass with torch.compile")
    sharding: Literal["none", "full"] = setting("none", "run", "several processes: DDP, or FSDP2 for large drafts")
    device: str = setting("auto", "run", "cpu, cuda, cuda:N or auto", min_length=1)

    @model_validator(mode="after")
    def _one_source(self) -> FitConfig:
        if bool(self.data) == bool(self.features):
            raise ValueError("expected exactly one of data and features")
        if self.row_tokens is not None and self.row_tokens < self.max_length:
            raise ValueError(f"row_tokens is {self.row_tokens}, expected at least max_length ({self.max_length})")
        return self

    @property
    def decay(self) -> float:
        """The loss's decay in force: the paper's is the block length."""
        return self.draft_len if self.loss_decay is None else self.loss_decay
