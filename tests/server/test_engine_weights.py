"""Rounded CPU weights are another model, and speculation is exact for that model too."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from dspark_core.checkpoint.load import load_target
from dspark_core.checkpoint.tokenizer import Tokenizer
from dspark_core.errors import CheckpointError
from dspark_core.sampling import SamplingParams
from dspark_core.settings import CpuWeights
from server.config import ServerConfig
from server.loader import load_engine
from server.request import Request, RequestParams
from tests.server.drafts import ScriptedDrafter
from tests.server.engines import GREEDY, MAX_MODEL_LEN, TinyTarget, make_engine, make_prompt, run
from tests.tiny import tiny_draft_folder, tiny_target_folder

COUNT = 24
LENGTHS = (1, 17, 64, 130)
SEEDED = SamplingParams(temperature=0.8, seed=5)


@cache
def target(weights: CpuWeights) -> TinyTarget:
    with TemporaryDirectory() as folder:
        path = tiny_target_folder(Path(folder), hidden_size=64, intermediate_size=96)
        model, tokenizer = load_target(path), Tokenizer.from_folder(path)
    model.prepare(max_positions=MAX_MODEL_LEN, emit_vocab=tokenizer.vocab_size, cpu_weights=weights)
    return TinyTarget(model, tokenizer, tokenizer.vocab_size)


@cache
def alone(weights: CpuWeights, sampling: SamplingParams) -> dict[int, list[int]]:
    """Plain decoding, one request at a time, by length of the prompt."""
    engine = make_engine(target=target(weights))
    params = RequestParams(sampling, max_tokens=COUNT)
    return {size: run(engine, [(make_prompt(size), params)])[0].ids for size in LENGTHS}


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("weights", ["float32", "float16", "int4"])
def test_speculation_in_a_batch_gives_the_text_of_plain_decoding_alone(
    weights: CpuWeights, sampling: SamplingParams
) -> None:
    def continuation(request: Request) -> list[int]:
        return alone(weights, sampling)[len(request.prompt_ids)]

    engine = make_engine(ScriptedDrafter(6, continuation, [0, 2, 6, 1], target(weights)), target=target(weights))
    jobs = [(make_prompt(size), RequestParams(sampling, max_tokens=COUNT)) for size in LENGTHS]
    for result in run(engine, jobs, arrivals=[0, 2, 3, 5]):
        assert result.ids == continuation(result.request)
        assert result.last.speculation.accepted > 0


def test_kinds_of_weights_are_different_models() -> None:
    found = [alone(weights, GREEDY) for weights in ("float32", "int4")]
    assert found[0] != found[1], "or the test above compares the same model three times"


@pytest.mark.parametrize("weights", ["float16", "int4"])
def test_the_server_says_what_it_does_to_the_weights(weights: CpuWeights, tmp_path: Path) -> None:
    path = tiny_target_folder(tmp_path, hidden_size=64, intermediate_size=96)
    draft = tiny_draft_folder(tmp_path, path, "vanilla", 4)
    settings = {"ckpt": str(draft), "target": str(path), "max_model_len": 128, "kv_memory_fraction": 0.01}
    engine = load_engine(ServerConfig.model_validate({**settings, "cpu_weights": weights}))
    assert weights.removeprefix("int") in engine.info["weights"]
    assert engine.info["exactness"] == "bitwise, whatever the batch"
    assert run(engine, [(make_prompt(9), RequestParams(GREEDY, max_tokens=8))])[0].ids
    with pytest.raises(CheckpointError, match=f"cpu_weights is {weights}, .* found bfloat16 on cpu"):
        load_engine(ServerConfig.model_validate({**settings, "cpu_weights": weights, "dtype": "bfloat16"}))
