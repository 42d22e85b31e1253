"""`dspark-train generate`: answers of the target itself to prompts, the data that a draft learns from."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dspark_core.checkpoint.files import locked
from dspark_core.errors import CheckpointError, RequestError
from dspark_core.randomness import derive_key
from dspark_core.sampling import SamplingParams
from dspark_core.train.records import append_record, read_prompts, resume_records
from server.config import ServerConfig
from server.engine import Engine
from server.loader import load_engine
from server.offline import Job, complete
from server.request import Request, RequestParams
from server.train.settings import GenerateConfig

logger = logging.getLogger(__name__)

# A change of any of these would mix two kinds of answers in one file.
_MUST_AGREE = ("target", "temperatures", "top_p", "samples_per_prompt", "max_tokens", "seed", "dtype")


@dataclass(frozen=True)
class Sample:
    """One answer to be generated. `id` names prompt and sample whatever their places in the file."""

    id: str
    domain: str
    messages: list[dict[str, Any]]
    temperature: float

    def params(self, config: GenerateConfig) -> RequestParams:
        """Seeded per sample: the answer is the same in any batch, and after any interruption."""
        sampling = SamplingParams(
            temperature=self.temperature,
            top_p=config.top_p if self.temperature > 0 else 1.0,
            seed=derive_key("generate", config.seed, self.id),
        )
        return RequestParams(sampling, max_tokens=config.max_tokens, speculative=False)


def make_samples(config: GenerateConfig) -> list[Sample]:
    """All samples, in an order mixed by the seed, so that the file is a fair one wherever it is cut."""
    samples = []
    for number, prompt in enumerate(read_prompts(Path(config.prompts))):
        content = json.dumps(prompt.messages, ensure_ascii=False)
        name = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
        for k in range(config.samples_per_prompt):
            temperature = config.temperatures[(number + k) % len(config.temperatures)]
            samples.append(Sample(f"{name}-{k}", prompt.domain, prompt.messages, temperature))
    unique = {sample.id: sample for sample in samples}
    if len(unique) < len(samples):
        logger.warning("%s: %d samples of repeated prompts left out", config.prompts, len(samples) - len(unique))
    return sorted(unique.values(), key=lambda sample: derive_key("order", config.seed, sample.id))


def generate(config: GenerateConfig) -> int:
    """Generate what the output file still lacks; returns the number of answers written.

    Raises:
        CheckpointError: a file is unusable, or the output was begun with other settings.
    """
    samples = make_samples(config)
    output = Path(config.output)
    with locked(output):
        return _complete(config, samples, output)


def _complete(config: GenerateConfig, samples: list[Sample], output: Path) -> int:
    settings = {name: getattr(config, name) for name in _MUST_AGREE}
    done = {record["id"] for record in resume_records(output, settings)}
    todo = [sample for sample in samples if sample.id not in done]
    if done:
        logger.info("%s: %d of %d answers are there", output, len(samples) - len(todo), len(samples))
    if not todo:
        return 0
    engine = load_engine(
        ServerConfig(
            target=config.target,
            dtype=config.dtype,
            device=config.device,
            max_model_len=config.max_prompt_tokens + config.max_tokens,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            kv_memory_fraction=config.kv_memory_fraction,
        ),
        with_draft=False,
    )
    try:
        return _write(engine, _jobs(engine, config, todo), output)
    except RequestError as error:
        raise CheckpointError(f"{config.prompts}: a prompt cannot be used: {error}") from None


def _write(engine: Engine, jobs: list[Job[Sample]], output: Path) -> int:
    written = tokens = 0
    with output.open("ab") as file, tqdm(total=len(jobs), unit="answer", smoothing=0.05) as bar:
        for sample, request in complete(engine, jobs):
            append_record(file, _record(sample, request))
            written, tokens = written + 1, tokens + request.num_generated
            bar.update()
            bar.set_postfix(tokens=tokens, refresh=False)
    return written


def _jobs(engine: Engine, config: GenerateConfig, todo: list[Sample]) -> list[Job[Sample]]:
    """Prompts as token ids, all before the first answer: one that cannot be used is known at once."""
    jobs = []
    for sample in todo:
        ids = engine.tokenizer.encode_chat(sample.messages)
        if len(ids) <= config.max_prompt_tokens:
            jobs.append((sample, ids, sample.params(config)))
    if len(jobs) < len(todo):
        logger.warning(
            "%d answers left out: their prompts have more than %d tokens (--max-prompt-tokens)",
            len(todo) - len(jobs),
            config.max_prompt_tokens,
        )
    return jobs


def _record(sample: Sample, request: Request) -> dict[str, Any]:
    return {
        "id": sample.id,
        "domain": sample.domain,
        "temperature": sample.temperature,
        "prompt_ids": request.prompt_ids,
        "response_ids": list(request.output_ids),
        "finish_reason": request.finish_reason,
        "messages": sample.messages,
    }
