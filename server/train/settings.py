"""What `dspark-train generate`, `eval` and `compare` can be told. Read without waiting for torch."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator

from dspark_core.settings import DtypeName, Settings, setting
from dspark_core.train.config import FIT_GROUPS, FitConfig

GENERATE_GROUPS = {"files": "files", "sampling": "the answers", "engine": "the engine's sizes"}
EVAL_GROUPS = {"files": "files", "measure": "what is measured", "engine": "the engine's sizes"}
COMPARE_GROUPS = {"compare": "the comparison", **FIT_GROUPS}

# What an arm changes of the settings that all share.
ARMS: dict[str, dict[str, Any]] = {
    "paper": {"ce_weight": 0.1, "tv_weight": 0.9, "confidence_weight": 1.0, "loss_decay": None},
    "cross_entropy": {"ce_weight": 1.0, "tv_weight": 0.0, "confidence_weight": 0.0},
    "decay_4": {"loss_decay": 4.0},
    "confidence_without_markov": {"confidence_head_with_markov": False},
    "dflash": {"markov_rank": 0},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
}
DEFAULT_ARMS = ("paper", "cross_entropy", "decay_4", "confidence_without_markov")


class GenerateConfig(Settings):
    """Everything `dspark-train generate` can be told."""

    target: str = setting("demo", "files", "target: a local folder, a hub id or 'demo'", min_length=1)
    prompts: str = setting(..., "files", 'JSONL file, a line {"domain", "prompt"} or {"domain", "messages"} each')
    output: str = setting(..., "files", "JSONL file to write; one that is there is completed, never overwritten")

    temperatures: tuple[float, ...] = setting(
        (0.0, 1.0), "sampling", "temperatures, given to the samples in turn", min_length=1
    )
    top_p: float = setting(1.0, "sampling", "nucleus of the samples with a temperature", gt=0, le=1)
    samples_per_prompt: int = setting(2, "sampling", "answers to every prompt", ge=1)
    max_tokens: int = setting(256, "sampling", "longest answer, in tokens", ge=1)
    seed: int = setting(0, "sampling", "seed; an answer depends on it, the prompt and the target alone", ge=0)

    max_prompt_tokens: int = setting(1024, "engine", "longer prompts are left out, with a warning", ge=1)
    max_num_seqs: int = setting(64, "engine", "answers generated at once", ge=1)
    max_num_batched_tokens: int = setting(512, "engine", "tokens in one pass of the target", ge=1)
    kv_memory_fraction: float = setting(0.3, "engine", "share of the free memory given to KV", gt=0, lt=1)
    dtype: DtypeName = setting("auto", "engine", "number type of weights and KV; auto: float32 on a CPU")
    device: str = setting("auto", "engine", "cpu, cuda, cuda:N or auto", min_length=1)


class EvalConfig(Settings):
    """Everything `dspark-train eval` can be told."""

    ckpt: str = setting("demo", "files", "draft: a local folder, a hub id or 'demo'", min_length=1)
    target: str | None = setting(None, "files", "target; unset: the one the draft names", min_length=1)
    prompts: str = setting(..., "files", 'JSONL file, a line {"domain", "prompt"} or {"domain", "messages"} each')
    json_file: str | None = setting(None, "files", "write the figures to this JSON file", min_length=1, alias="json")

    temperature: float = setting(0.0, "measure", "temperature of the answers; 0 is greedy", ge=0)
    max_tokens: int = setting(96, "measure", "longest answer, in tokens", ge=1)
    limit: int | None = setting(None, "measure", "only so many prompts of every domain", ge=1)
    seed: int = setting(0, "measure", "seed of the engine's draws", ge=0)

    max_num_seqs: int = setting(16, "engine", "answers generated at once", ge=1)
    draft_len: int | None = setting(None, "engine", "proposals per block; unset: as trained", ge=1)
    dtype: DtypeName = setting("auto", "engine", "number type of weights and KV; auto: float32 on a CPU")
    device: str = setting("auto", "engine", "cpu, cuda, cuda:N or auto", min_length=1)


class CompareConfig(FitConfig):
    """Everything `dspark-train compare` can be told: the settings of `fit`, where every arm starts, and its own."""

    output: str = setting(..., "files", "folder for the arms' drafts, the table and the plot", min_length=1)
    prompts: str = setting(..., "compare", "JSONL file of prompts to measure on, none of them trained on")
    arms: tuple[str, ...] = setting(DEFAULT_ARMS, "compare", f"what to compare, of {', '.join(ARMS)}", min_length=1)
    temperatures: tuple[float, ...] = setting((0.0, 1.0), "compare", "temperatures to measure at", min_length=1)
    max_tokens: int = setting(96, "compare", "longest answer, in tokens", ge=1)
    limit: int | None = setting(None, "compare", "only so many prompts of every domain", ge=1)

    @field_validator("arms")
    @classmethod
    def _known_arms(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [arm for arm in value if arm not in ARMS]:
            raise ValueError(f"found {unknown[0]!r}, expected some of {', '.join(ARMS)}")
        return value
