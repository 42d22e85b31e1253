"""From the server's settings to a ready engine: resolves, loads, checks, sizes the KV memory."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from dspark_core.checkpoint.load import load_draft, load_target, shares_head
from dspark_core.checkpoint.references import DEMO, resolve_draft, resolve_target
from dspark_core.checkpoint.tokenizer import Tokenizer
from dspark_core.config import DecoderConfig, read_draft_config
from dspark_core.draft.backbone import DraftModel
from dspark_core.draft.drafter import Drafter
from dspark_core.errors import CheckpointError
from dspark_core.models.decoder import TargetModel
from dspark_core.models.kv_cache import KVPool, bytes_per_page
from dspark_core.models.packed import is_row_invariant
from server.config import ServerConfig
from server.engine import Engine, EngineParts

logger = logging.getLogger(__name__)


def load_engine(config: ServerConfig) -> Engine:
    """Load target and draft and build the engine.

    Raises:
        CheckpointError: a model cannot be found, read or paired, or the KV memory does not hold one request.
    """
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    draft_folder = resolve_draft(config.ckpt)
    target_folder = resolve_target(config.target or _named_target(config.ckpt, draft_folder))
    target = load_target(target_folder, dtype=dtype, device=device)
    tokenizer = Tokenizer.from_folder(target_folder)
    draft = load_draft(draft_folder, target, draft_len=config.draft_len)
    emit_vocab = min(tokenizer.vocab_size, target.config.vocab_size)
    shared_head = shares_head(draft, target)
    limit = min(target.config.context_limit, draft.config.decoder.context_limit)
    page_bytes = _page_bytes(target.config, config.page_size, dtype) + _page_bytes(
        draft.config.decoder, config.page_size, dtype
    )
    budget = int(_free_memory(device) * config.kv_memory_fraction)
    max_model_len = _max_model_len(config.max_model_len, limit, budget // page_bytes * config.page_size, budget)
    per_request = -(-max_model_len // config.page_size)
    num_pages = max(per_request, min(budget // page_bytes, per_request * config.max_num_seqs))
    target.prepare(max_positions=max_model_len, emit_vocab=emit_vocab)
    draft.prepare(max_positions=max_model_len, emit_vocab=emit_vocab, lm_head=target.lm_head if shared_head else None)
    parts = EngineParts(
        target=target,
        pool=KVPool.of(target.config, num_pages, config.page_size, dtype, device),
        drafter=Drafter(draft, KVPool.of(draft.config.decoder, num_pages, config.page_size, dtype, device)),
        tokenizer=tokenizer,
        eos_token_ids=tokenizer.eos_token_ids | target.config.eos_token_ids,
        vocab_size=emit_vocab,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        seed=config.seed,
    )
    parts.info.update(_info(target, target_folder, draft, draft_folder, parts, num_pages * page_bytes))
    return Engine(parts)


def _named_target(ckpt: str, draft_folder: Path) -> str:
    if ckpt == DEMO:
        return DEMO
    name = read_draft_config(draft_folder).target_name
    if not name:
        raise CheckpointError(f"{draft_folder}: the draft does not say which target it belongs to; give --target")
    logger.info("target not given; the draft's config names %s", name)
    return name


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CheckpointError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _page_bytes(config: DecoderConfig, page_size: int, dtype: torch.dtype) -> int:
    return bytes_per_page(
        num_layers=config.num_layers,
        page_size=page_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )


def _free_memory(device: torch.device) -> int:
    """Bytes that can still be had on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _max_model_len(asked: int | None, limit: int, capacity: int, budget: int) -> int:
    """The context in force: what was asked for, else what models and memory allow."""
    if asked is not None and asked > limit:
        raise CheckpointError(f"--max-model-len is {asked}, expected at most {limit}, the limit of target and draft")
    if capacity < (asked or 2):
        raise CheckpointError(
            f"KV memory of {budget // 2**20} MiB holds {capacity} tokens, expected at least {asked or 2}: "
            "raise --kv-memory-fraction or lower --max-model-len"
        )
    if asked is None and capacity < limit:
        logger.warning("context is %d tokens, not %d: KV memory holds no more", capacity, limit)
    return asked if asked is not None else min(limit, capacity)


def _info(
    target: TargetModel,
    target_folder: Path,
    draft: DraftModel,
    draft_folder: Path,
    parts: EngineParts,
    kv_bytes: int,
) -> dict[str, str]:
    config, tokens = draft.config, parts.pool.num_pages * parts.pool.page_size
    bitwise = is_row_invariant(target)
    confidence = "with a confidence head" if config.enable_confidence_head else "no confidence head"
    return {
        "target": f"{target_folder.name} ({target.config.family}, {target.config.num_layers} layers)",
        "draft": f"{draft_folder} ({config.decoder.num_layers} layers)",
        "head": f"{config.head_name}, {confidence}",
        "draft_len": str(config.draft_len),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "KV capacity": f"{tokens} tokens, {kv_bytes // 2**20} MiB",
        "max_model_len": str(parts.max_model_len),
        "max_num_seqs": str(parts.max_num_seqs),
        "verification": "full block (no calibration yet)",
        "exactness": "bitwise, whatever the batch" if bitwise else "up to near-ties of the two best tokens",
    }
