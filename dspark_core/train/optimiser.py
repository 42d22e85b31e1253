"""AdamW over the draft's parameters, and its learning rate as a function of the step."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dspark_core.train.config import FitConfig

_HEADS = ("markov_head.", "confidence_head.")


def make_optimiser(draft: nn.Module, config: FitConfig) -> torch.optim.AdamW:
    """Groups by part and by decay: vectors never decay; heads may learn at another rate."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in draft.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((name.startswith(_HEADS), parameter.dim() > 1), []).append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "scale": config.head_lr_scale if is_head else 1.0,
                "weight_decay": config.weight_decay if is_matrix else 0.0,
            }
            for (is_head, is_matrix), parameters in groups.items()
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def learning_rate(step: int, num_steps: int, config: FitConfig) -> float:
    """Linear warm-up, then half a cosine down to `min_lr_ratio` of the highest rate. `step` counts from 0."""
    warmup = math.ceil(config.warmup_ratio * num_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    share = (step - warmup) / max(num_steps - 1 - warmup, 1)
    floor = config.min_lr_ratio
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0))))


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate * group["scale"]


def clip_gradients(module: nn.Module, largest: float) -> float:
    """Scale gradients to a norm of at most `largest`; returns the norm before."""
    norm: Tensor = nn.utils.clip_grad_norm_([p for p in module.parameters() if p.requires_grad], largest)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
