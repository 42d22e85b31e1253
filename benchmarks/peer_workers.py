"""One engine in a process of its own, told over standard input what to answer. Run by `benchmarks.peers`.

    INTERPRETER peer_workers.py {dspark|transformers|llama_cpp|vllm} MODEL CONCURRENT [OPTION ...]

Needs nothing but the engine itself: the interpreter may be that of another environment. A line in is a JSON object
{"prompts": [[token id, ...], ...], "max_tokens": n}; a line out {"seconds": s, "tokens": n}. Greedy, and every answer
has exactly `max_tokens` tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Answers all prompts, and returns how many tokens it made.
Answer = Callable[[list[list[int]], int], int]


def dspark(model: str, concurrent: int, cpu_weights: str, speculative: str) -> Answer:
    """Our engine: `speculative` is "draft" or "plain", which loads no draft at all."""
    from dspark_core.sampling import SamplingParams
    from server.config import ServerConfig
    from server.loader import load_engine
    from server.request import RequestParams

    settings = {"target": model, "max_model_len": 1024, "cpu_weights": cpu_weights, "max_num_seqs": concurrent}
    drafting = speculative == "draft"
    config = ServerConfig.model_validate({**settings, "kv_memory_fraction": 0.1, "prefix_cache": False})
    engine = load_engine(config, with_draft=drafting)

    def answer(prompts: list[list[int]], max_tokens: int) -> int:
        params = RequestParams(SamplingParams(temperature=0), max_tokens=max_tokens, ignore_eos=True)
        requests = [engine.make_request(prompt, params) for prompt in prompts]
        for request in requests:
            engine.add(request)
        while engine.has_work:
            engine.step()
        return sum(request.num_generated for request in requests)

    return answer


def transformers(model: str, _: int) -> Answer:
    """`generate`, one prompt at a time: with static batches of unequal prompts it would do other work."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def answer(prompts: list[list[int]], max_tokens: int) -> int:
        tokens = 0
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = loaded.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=max_tokens,
                max_new_tokens=max_tokens,
                pad_token_id=0,
            )
            tokens += out.shape[1] - len(prompt)
        return tokens

    return answer


def llama_cpp(model: str, concurrent: int) -> Answer:
    """llama.cpp's server from the xllamacpp wheel, over HTTP on the loopback interface; MODEL is a GGUF file."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel = 1024 * concurrent, concurrent
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count()
    params.cache_prompt, params.warmup, params.port = False, True, 0
    params.hostnames = ["127.0.0.1"]
    server = xllamacpp.Server(params)
    pool = ThreadPoolExecutor(concurrent)

    def one(prompt: list[int], max_tokens: int) -> int:
        body = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        request = urllib.request.Request(f"{server.listening_address}/completion", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as response:
            return int(json.load(response)["tokens_predicted"])

    return lambda prompts, max_tokens: sum(pool.map(one, prompts, [max_tokens] * len(prompts)))


def vllm(model: str, concurrent: int) -> Answer:
    """vLLM's offline engine in float32."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, dtype="float32", max_model_len=1024, max_num_seqs=concurrent, enable_prefix_caching=False)

    def answer(prompts: list[list[int]], max_tokens: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return sum(len(out.outputs[0].token_ids) for out in llm.generate(inputs, params, use_tqdm=False))

    return answer


def main() -> None:
    kind, model, concurrent, *options = sys.argv[1:]
    engines: dict[str, Callable[..., Answer]] = {
        "dspark": dspark,
        "transformers": transformers,
        "llama_cpp": llama_cpp,
        "vllm": vllm,
    }
    # What engines print must not get between the answers.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answer = engines[kind](model, int(concurrent), *options)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        start = time.perf_counter()
        tokens = answer(job["prompts"], job["max_tokens"])
        print(json.dumps({"seconds": time.perf_counter() - start, "tokens": tokens}), file=replies, flush=True)


if __name__ == "__main__":
    main()
