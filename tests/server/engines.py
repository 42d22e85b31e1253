"""Engines around tiny random models, and ways to run requests through them with every invariant checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from dspark_core.checkpoint.load import load_draft, load_target
from dspark_core.checkpoint.tokenizer import Tokenizer
from dspark_core.config import DecoderConfig
from dspark_core.draft.backbone import DraftModel
from dspark_core.draft.drafter import Drafter
from dspark_core.models.attention import FlatBatch, Segment
from dspark_core.models.decoder import TargetModel
from dspark_core.models.kv_cache import KVPool
from dspark_core.sampling import SamplingParams
from server.engine import Engine, EngineParts
from server.request import Delta, Request, RequestParams, TokenLogprob
from tests.tiny import tiny_draft_folder, tiny_target_folder

MAX_MODEL_LEN = 256
MAX_DRAFT_LEN = 7
GREEDY = SamplingParams(temperature=0)


class AnyDrafter(Protocol):
    """What the engine asks of a drafter."""

    model: Any
    pool: KVPool

    def draft(self, blocks: Any, choose: Any) -> Any: ...

    def absorb(self, features: Tensor, positions: Tensor, slots: Tensor) -> None: ...


@dataclass(frozen=True)
class TinyTarget:
    """A prepared target, its tokenizer, and its vocabulary (ids that may be emitted)."""

    model: TargetModel
    tokenizer: Tokenizer
    vocab_size: int


@cache
def tiny_target(vocab_size: int = 259) -> TinyTarget:
    """The target of these tests: logits well spread, so that greedy text is neither constant nor full of ties."""
    with TemporaryDirectory() as folder:
        path = tiny_target_folder(Path(folder), vocab_size=vocab_size)
        model, tokenizer = load_target(path), Tokenizer.from_folder(path)
    model.prepare(max_positions=MAX_MODEL_LEN, emit_vocab=tokenizer.vocab_size)
    return TinyTarget(model, tokenizer, min(tokenizer.vocab_size, vocab_size))


@cache
def tiny_draft(head: str, draft_len: int, agrees: bool = False) -> DraftModel:
    """A prepared draft for the target above; `agrees`: right about every second time."""
    with TemporaryDirectory() as folder:
        target_path = tiny_target_folder(Path(folder))
        path = tiny_draft_folder(Path(folder), target_path, head, MAX_DRAFT_LEN, agrees=agrees)
        model = load_draft(path, load_target(target_path), draft_len=draft_len)
    model.prepare(max_positions=MAX_MODEL_LEN, emit_vocab=tiny_target().vocab_size)
    return model


def make_pool(config: DecoderConfig, num_pages: int, page_size: int) -> KVPool:
    return KVPool.of(config, num_pages, page_size, torch.float32, torch.device("cpu"))


def make_engine(
    draft: AnyDrafter | DraftModel | None = None,
    *,
    page_size: int = 16,
    num_tokens: int = 2048,
    target: TinyTarget | None = None,
    eos: Sequence[int] = (),
    max_model_len: int = MAX_MODEL_LEN,
    seed: int | None = 0,
    **limits: Any,
) -> Engine:
    """An engine over the tiny target. Without `eos` no token ends a text by itself.

    Args:
        draft: a drafter from tests.server.drafts, a prepared draft model, or None for plain decoding.
        num_tokens: what KV memory holds, whole pages.
        limits: max_num_seqs, max_num_batched_tokens.
    """
    target = target or tiny_target()
    num_pages = -(-num_tokens // page_size)
    if isinstance(draft, DraftModel):
        draft = Drafter(draft, make_pool(draft.config.decoder, num_pages, page_size))
    elif draft is not None:
        draft.pool = make_pool(draft.model.config.decoder, num_pages, page_size)
    parts = EngineParts(
        target=target.model,
        pool=make_pool(target.model.config, num_pages, page_size),
        drafter=cast("Drafter | None", draft),
        tokenizer=target.tokenizer,
        eos_token_ids=frozenset(eos),
        vocab_size=target.vocab_size,
        max_model_len=max_model_len,
        seed=seed,
        **limits,
    )
    engine = Engine(parts)
    if draft is not None and hasattr(draft, "attach"):
        draft.attach(engine)
    return engine


@dataclass
class Result:
    """What the client of one request was told, joined."""

    request: Request
    deltas: list[Delta] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for delta in self.deltas for entry in delta.logprobs or ()]

    @property
    def last(self) -> Delta:
        return self.deltas[-1]


def run(
    engine: Engine,
    jobs: Sequence[tuple[Sequence[int], RequestParams]],
    *,
    arrivals: Sequence[int] | None = None,
    aborts: Mapping[int, int] | None = None,
    on_step: Callable[[Engine], None] | None = None,
) -> list[Result]:
    """Run requests until the engine is idle; memory must then be whole and free.

    Args:
        jobs: prompt and parameters of each request.
        arrivals: number of the step before which each is added; all before the first by default.
        aborts: job -> number of the step before which it is aborted.
        on_step: called after every step.
    """
    results = [Result(engine.make_request(prompt, params)) for prompt, params in jobs]
    by_request = {id(result.request): result for result in results}
    arrivals = arrivals or [0] * len(jobs)
    step = 0
    while engine.has_work or step <= max(arrivals):
        for index, result in enumerate(results):
            if arrivals[index] == step:
                engine.add(result.request)
            if (aborts or {}).get(index) == step and (delta := engine.abort(result.request)):
                result.deltas.append(delta)
        for request, delta in engine.step():
            by_request[id(request)].deltas.append(delta)
        check_invariants(engine)
        if on_step:
            on_step(engine)
        step += 1
        assert step < 5000, "the engine does not come to an end"
    check_idle(engine)
    for result in results:
        check_deltas(result)
    return results


def run_one(engine: Engine, prompt: Sequence[int], params: RequestParams) -> Result:
    return run(engine, [(prompt, params)])[0]


def check_invariants(engine: Engine) -> None:
    """Between steps: every page has one owner, and no request is ahead of its tokens."""
    scheduler = engine.scheduler
    engine.memory.check_integrity([r.table for r in [*scheduler.running, *scheduler.waiting]])
    assert len(scheduler.running) <= engine.max_num_seqs
    for request in scheduler.running:
        table = request.table
        assert not request.finished
        assert 0 <= table.kv_len <= len(request.tokens) - 1
        assert table.kv_len <= len(table.pages) * engine.memory.page_size
        assert len(table.pages) <= engine.memory.pages_for(len(request.tokens) + engine.draft_len)
        keeps = engine.scheduler.keeps_context(request)
        assert table.draft_context_len == (table.kv_len - engine.context.size(request) if keeps else 0)
    assert all(r.table.pages == [] and r.table.kv_len == 0 for r in scheduler.waiting)


def check_idle(engine: Engine) -> None:
    engine.memory.check_integrity([])
    assert engine.memory.num_free == engine.memory.num_pages
    assert not engine.has_work


def check_deltas(result: Result) -> None:
    """Exactly one last delta, and its totals are those of what was delivered."""
    assert [delta.last for delta in result.deltas] == [False] * (len(result.deltas) - 1) + [True]
    assert result.last.completion_tokens == len(result.ids) == result.request.num_generated
    assert result.ids == list(result.request.output_ids)
    spent = result.last.speculation
    assert spent.rounds <= spent.drafted
    assert 0 <= spent.accepted <= min(spent.verified, len(result.ids))
    assert spent.verified <= spent.drafted


@torch.inference_mode()
def target_logits(tokens: Sequence[int], target: TinyTarget | None = None) -> Tensor:
    """[T, V] logits of a whole sequence in one pass over fresh memory: no cache, no batch, no chunks."""
    model = (target or tiny_target()).model
    size = len(tokens)
    pool = make_pool(model.config, -(-size // 64), 64)
    places = torch.arange(size)
    batch = FlatBatch(torch.tensor(tokens), places, places, [Segment(0, size, 0, range(pool.num_pages))])
    return cast(Tensor, model(batch, pool).logits)


@cache
def reference_greedy(prompt: tuple[int, ...], count: int) -> list[int]:
    """Greedy continuation by recomputing everything for every token: slow, and independent of the engine."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(target_logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """Printable bytes; the first `length` of one row per seed, so that shorter ones are prefixes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 97, (MAX_MODEL_LEN,), generator=generator)[:length].tolist()
