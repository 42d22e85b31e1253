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
from dspark_core.devices import find_device, find_dtype
from dspark_core.draft.backbone import DraftModel
from dspark_core.draft.drafter import Drafter
from dspark_core.errors import CheckpointError
from dspark_core.memory import give_back_memory
from dspark_core.models.decoder import TargetModel
from dspark_core.models.kv_cache import KVPool, bytes_per_page
from dspark_core.sampler import warm_up
from dspark_core.settings import CpuWeights
from server.config import ServerConfig
from server.engine import Engine, EngineParts
from server.verification import Models, choose_policy

logger = logging.getLogger(__name__)

WEIGHTS: dict[CpuWeights, str] = {
    "exact": "as in the checkpoint",
    "float32": "as in the checkpoint",
    "float16": "rounded to float16",
    "int8": "rounded to 8 bits in groups of 32",
    "int4": "rounded to 4 bits in groups of 32, the LM head to 8",
}


# Tokens of a pass. More would make prompts no faster on a CPU, and keep the streams of others waiting longer.
BATCHED_TOKENS = {True: 128, False: 2048}


def load_engine(config: ServerConfig, *, with_draft: bool = True) -> Engine:
    """Load target and draft and build the engine.

    Args:
        with_draft: False for an engine that decodes plainly and loads no draft; `config.target` must then be given.

    Raises:
        CheckpointError: a model cannot be found, read or paired, or the KV memory does not hold one request.
    """
    device = find_device(config.device)
    dtype = find_dtype(config.dtype, device)
    draft_folder = resolve_draft(config.ckpt) if with_draft else None
    target_folder = resolve_target(config.target or _named_target(config.ckpt, draft_folder))
    target = load_target(target_folder, dtype=dtype, device=device)
    tokenizer = Tokenizer.from_folder(target_folder)
    draft = load_draft(draft_folder, target, draft_len=config.draft_len) if draft_folder else None
    give_back_memory()
    emit_vocab = min(tokenizer.vocab_size, target.config.vocab_size)
    shared_head = draft is not None and shares_head(draft, target)
    decoders = [target.config, *([draft.config.decoder] if draft else [])]
    limit = min(decoder.context_limit for decoder in decoders)
    page_bytes = sum(_page_bytes(decoder, config.page_size, dtype) for decoder in decoders)
    budget = int(_free_memory(device) * config.kv_memory_fraction)
    max_model_len = _max_model_len(config.max_model_len, limit, budget // page_bytes * config.page_size, budget)
    per_request = -(-max_model_len // config.page_size)
    num_pages = max(per_request, min(budget // page_bytes, per_request * config.max_num_seqs))
    target.prepare(max_positions=max_model_len, emit_vocab=emit_vocab, cpu_weights=config.cpu_weights)
    give_back_memory()
    drafter = None
    if draft:
        head = target.lm_head if shared_head else None
        draft.prepare(max_positions=max_model_len, emit_vocab=emit_vocab, lm_head=head, cpu_weights=config.cpu_weights)
        give_back_memory()
        drafter = Drafter(draft, KVPool.of(draft.config.decoder, num_pages, config.page_size, dtype, device))
    parts = EngineParts(
        target=target,
        pool=KVPool.of(target.config, num_pages, config.page_size, dtype, device),
        drafter=drafter,
        tokenizer=tokenizer,
        eos_token_ids=tokenizer.eos_token_ids | target.config.eos_token_ids,
        vocab_size=emit_vocab,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or BATCHED_TOKENS[device.type == "cpu"],
        prefix_cache=config.prefix_cache,
        seed=config.seed,
    )
    parts.info.update(_info(target_folder, draft_folder, parts, num_pages * page_bytes, config))
    engine = Engine(parts)
    warm_up(device)
    if draft_folder:
        models = Models.of(config, engine, target_folder, draft_folder)
        engine.origin = models.origin
        engine.policy, told = choose_policy(config, engine, models)
        engine.info |= told
    return engine


def _named_target(ckpt: str, draft_folder: Path | None) -> str:
    assert draft_folder is not None, "an engine without a draft needs a target by name"
    if ckpt == DEMO:
        return DEMO
    name = read_draft_config(draft_folder).target_name
    if not name:
        raise CheckpointError(f"{draft_folder}: the draft does not say which target it belongs to; give --target")
    logger.info("target not given; the draft's config names %s", name)
    return name


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
    return min(_machine_memory(), _container_memory(Path("/sys/fs/cgroup")))


def _machine_memory() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _container_memory(group: Path) -> int:
    """What a container's limit leaves (cgroup v2); more than any machine has where there is none.

    Files that the kernel keeps for reading again count as used there, and are given up when memory is wanted.
    """
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(int(limit) - used + int(kept["inactive_file"]), 0)
    except (OSError, ValueError, KeyError):  # no group of its own, or "max": no limit
        return 2**62


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
    target_folder: Path, draft_folder: Path | None, parts: EngineParts, kv_bytes: int, config: ServerConfig
) -> dict[str, str]:
    target, tokens = parts.target, parts.pool.num_pages * parts.pool.page_size
    bitwise = target.runner is not None and target.runner.exact
    draft = {"draft": "none, plain decoding"}
    if parts.drafter:
        draft = _draft_info(parts.drafter.model, draft_folder)
    return {
        "target": f"{target_folder.name} ({target.config.family}, {target.config.num_layers} layers)",
        **draft,
        "dtype": str(target.dtype).removeprefix("torch."),
        "weights": f"{WEIGHTS[config.cpu_weights]}, stored as {_sizes(target)}",
        "device": str(target.device),
        "KV capacity": f"{tokens} tokens, {kv_bytes // 2**20} MiB",
        "max_model_len": str(parts.max_model_len),
        "max_num_seqs": str(parts.max_num_seqs),
        "exactness": "bitwise, whatever the batch" if bitwise else "up to near-ties of the two best tokens",
    }


def _sizes(target: TargetModel) -> str:
    return ", ".join(f"{kind} ({size / 2**20:.0f} MiB)" for kind, size in target.weight_bytes.items())


def _draft_info(draft: DraftModel, draft_folder: Path | None) -> dict[str, str]:
    config = draft.config
    confidence = "with a confidence head" if config.enable_confidence_head else "no confidence head"
    return {
        "draft": f"{draft_folder} ({config.decoder.num_layers} layers)",
        "head": f"{config.head_name}, {confidence}",
        "draft_len": str(config.draft_len),
    }
