"""What `dspark-calibrate` can be told. Read without waiting for torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from dspark_core.settings import CpuWeights, DtypeName, Settings, setting

DEFAULT_PROMPTS = Path(__file__).with_name("prompts.jsonl")
GROUPS = {"model": "what is calibrated", "records": "the records", "fit": "the fit", "profile": "costs of steps"}


class CalibrateConfig(Settings):
    """Everything `dspark-calibrate` and its commands can be told."""

    ckpt: str = setting("demo", "model", "draft: a local folder, a hub id or 'demo'", min_length=1)
    target: str | None = setting(None, "model", "target; unset: the one the draft names", min_length=1)
    output: str | None = setting(
        None, "model", "folder for all files; unset: the draft's, or the cache for 'demo' and hub ids", min_length=1
    )
    dtype: DtypeName = setting("auto", "model", "number type of weights and KV; auto: float32 on a CPU")
    cpu_weights: CpuWeights = setting("exact", "model", "weights on a CPU, as for dspark-serve")
    device: str = setting("auto", "model", "cpu, cuda, cuda:N or auto", min_length=1)
    draft_len: int | None = setting(None, "model", "proposals per block; unset: as trained", ge=1)

    prompts: str | None = setting(
        None,
        "records",
        'JSONL file, a line {"domain", "prompt"} or {"domain", "messages"} each; unset: ours',
        min_length=1,
    )
    temperatures: tuple[float, ...] = setting(
        (0.7, 1.0), "records", "temperatures of the answers that are not greedy", min_length=1
    )
    max_tokens: int = setting(40, "records", "longest answer, in tokens", ge=2)
    answers: int = setting(
        540, "records", "answers in all, shared out among domains and rules; ask for more later and it goes on", ge=1
    )
    max_num_seqs: int = setting(16, "records", "answers generated at once", ge=1)
    seed: int = setting(0, "records", "seed of the answers and of the split", ge=0)

    held_out: float = setting(0.4, "fit", "share of the prompts to judge by, not fitted on", gt=0, lt=1)
    method: Literal["auto", "sts", "platt"] = setting(
        "auto", "fit", "sts: a temperature a position; platt: a scale and a bias; auto: platt if clearly better"
    )
    bins: int = setting(15, "fit", "bins of the calibration error", ge=2)

    contexts: tuple[int, ...] = setting((256, 1024), "profile", "lengths of context to measure steps at", min_length=1)
    repeats: int = setting(7, "profile", "samples of every step, more of short ones", ge=1)
