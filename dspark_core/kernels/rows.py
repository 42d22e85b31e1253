"""Kernels over rows of logits, by name and what they take; and those of them that are functions of tensors alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark_core.kernels.launch import Kernel

# x: address of float32 rows; size: of a row; temperatures: address of one for each row, or 0 for 1 everywhere.
SOFTMAX = Kernel("softmax")  # x, out, size, temperatures
UNIFORM = Kernel("uniform")  # int64 keys, int64 rounds, float64 out, purpose, slots
DRAW = Kernel("draw")  # x, size, temperatures, float64 numbers, int64 ids out
# x, size, temperatures, row starts, lens, slots, draft ids, addresses by slot of draft logits, their temperatures,
# float64 numbers of slots and of requests, int64 accepted and next ids out
VERIFY = Kernel("verify")
COUPLE = Kernel("couple")  # x, size, temperatures, keys, positions, purpose, int64 ids out
PICK = Kernel("pick")  # x, size, int64 ids out


def expect(tensor: Tensor, dtype: torch.dtype, shape: Sequence[int], *, below: int | None = None) -> None:
    """Kernels trust what they are given. `below`: for numbers from 0 on."""
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, tuple(shape)), (tensor.dtype, tensor.shape, shape)
    assert tensor.is_contiguous()
    if below is not None and tensor.numel():
        numbers = tensor.numpy()
        assert 0 <= numbers.min() <= numbers.max() < below, f"{tensor.tolist()}, expected 0 to {below - 1}"


def most_likely(logits: Tensor) -> Tensor:
    """As `dspark_core.verify.greedy_choices`, of float32 logits on a CPU."""
    expect(logits, torch.float32, logits.shape)
    ids = torch.empty(len(logits), dtype=torch.int64)
    PICK(len(logits), logits.data_ptr(), logits.shape[1], ids.data_ptr())
    return ids


def softmax(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Softmax of the rows of `logits` [N, V] divided by `temperature` [N]; float32, contiguous."""
    expect(logits, torch.float32, logits.shape)
    if temperature is not None:
        expect(temperature, torch.float32, logits.shape[:1])
    out, divisors = torch.empty_like(logits), 0 if temperature is None else temperature.data_ptr()
    SOFTMAX(logits.shape[0], logits.data_ptr(), out.data_ptr(), logits.shape[1], divisors)
    return out


def uniform(keys: Tensor, rounds: Tensor, purpose: int, slots: int) -> Tensor:
    """`dspark_core.randomness.uniform` of keys and rounds [R], a purpose and slots 0, 1, ...: [R, slots]."""
    for part in (keys, rounds):
        expect(part, torch.int64, keys.shape)
    out = torch.empty(len(keys), slots, dtype=torch.float64)
    UNIFORM(len(keys), keys.data_ptr(), rounds.data_ptr(), out.data_ptr(), purpose, slots)
    return out
