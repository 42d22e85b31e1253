"""Scheduler and KV memory together under random use, against a picture of what every page holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from hypothesis.strategies import fixed_dictionaries, integers, lists, sampled_from, tuples

from server.kv import KVMemory, PageTable
from server.request import Request
from server.scheduler import MIN_CHUNK, RequestScheduler, Work
from tests.server import test_scheduler

SIZE, LETTERS, NOT_FINITE = 6, b"abcd", -1  # a prompt's part ends inside a page: MIN_CHUNK is no multiple of 6
# How many drafts stand in the blocks of a step, for its requests in turn.
ACCEPTED = lists(sampled_from([0, 1, 2, 3, 4, 5] * 3 + [NOT_FINITE]), min_size=1, max_size=4)
LIMITS = {"draft_len": integers(0, 5), "max_num_seqs": integers(1, 6), "max_num_batched_tokens": integers(9, 60)}
MOSTLY = sampled_from([True, True, True, False])
Plan = list[tuple[Work, int]]
Row = tuple[int, int, int]  # page, offset, number of the text up to there


def continuation(tokens: Sequence[int], count: int) -> list[int]:
    """What the target says next: the same to the same text, so that answers are shared too."""
    text = list(tokens)
    for _ in range(count):
        text.append(LETTERS[(sum(text[-3:]) * 7 + len(text) // 3) % len(LETTERS)])
    return text[len(tokens) :]


STEM = continuation([], 100)
seen = Counter[str]()


class Pages:
    """What is written where: keys and values of the target, and the draft's context."""

    def __init__(self, num_pages: int) -> None:
        self.keys, self.context = ([dict[int, int]() for _ in range(num_pages)] for _ in range(2))
        self.writers: dict[int, Request] = {}

    def clear(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.keys[page], self.context[page] = {}, {}
            self.writers.pop(page, None)

    def write(self, request: Request, tokens: Sequence[int]) -> list[Row]:
        """Write keys and values of the tokens that are not committed."""
        rows = rows_of(request.table, tokens)[request.table.kv_len :]
        for page, offset, text in rows:
            assert self.writers.setdefault(page, request) is request, "a page changed hands and was not cleared"
            self.keys[page][offset] = text
        return rows


def rows_of(table: PageTable, tokens: Sequence[int]) -> list[Row]:
    texts = list(accumulate(tokens, lambda text, token: hash((text, token)), initial=0))[1:]
    return [(table.pages[place // SIZE], place % SIZE, text) for place, text in enumerate(texts)]


class Machine(RuleBasedStateMachine):
    """Does with scheduler and memory what the engine does. `requests` are all that have not ended, oldest first."""

    @initialize(num_pages=integers(5, 20), limits=fixed_dictionaries(LIMITS), prefix_cache=MOSTLY)
    def start(self, num_pages: int, limits: dict[str, int], prefix_cache: bool) -> None:
        self.memory, self.pages = KVMemory(num_pages, SIZE, prefix_cache=prefix_cache), Pages(num_pages)
        self.scheduler = RequestScheduler(self.memory, **limits)
        self.requests: list[Request] = []
        self.decoding: set[Request] = set()
        self.late: dict[Request, list[Row]] = {}  # rows whose context is to be written
        self.scheduler.before_preemption = self.publish

    @rule(stem=integers(0, 70), own=sampled_from([0, 0, 4, 45]), room=integers(1, 50), kind=tuples(*[MOSTLY] * 3))
    def add(self, stem: int, own: int, room: int, kind: tuple[bool, bool, bool]) -> None:
        speculative, endless, single = kind
        for longer in [0] if single else [0, 0, SIZE, SIZE]:
            prompt = [*STEM[: stem + longer], *b"x" * own][: self.memory.capacity - 1] or [*b"y"]
            fits = min(room, self.memory.capacity - len(prompt))
            request = test_scheduler.add(self.scheduler, 0, max_tokens=fits, speculative=speculative, prompt=prompt)
            request.stop_ids = frozenset(() if endless else LETTERS[:1])
            self.requests.append(request)

    @rule(accepted=ACCEPTED, steps=integers(1, 8))
    def run(self, accepted: list[int], steps: int) -> None:
        for _ in range(steps):
            plan = self.schedule(accepted)
            rows = self.compute(plan)
            self.deliver(plan)
            self.commit(plan, rows)
            self.check()

    @rule(which=integers(0, 20))
    def abort(self, which: int) -> None:
        if self.requests:
            request = self.requests[which % len(self.requests)]
            self.remove(request)
            request.abort()

    @rule(accepted=ACCEPTED, stage=integers(0, 2))
    def break_step(self, accepted: list[int], stage: int) -> None:
        plan = self.schedule(accepted)
        for part in (self.compute, self.deliver)[:stage]:
            part(plan)
        for request in list(self.scheduler.running):
            self.remove(request)
            request.fail("it broke")
        self.clear_cache()
        self.pages.clear(range(self.memory.num_pages))  # nothing of before may be found again

    @rule()
    def clear_cache(self) -> None:
        self.memory.clear_cache()

    def schedule(self, accepted: list[int]) -> Plan:
        """The next step's work, and how many drafts of each will stand."""
        scheduler, memory = self.scheduler, self.memory
        before, free, shared = {r: r.table.kv_len for r in scheduler.running}, memory.num_free, memory.shared_tokens
        decoding = [request for request in before if request.pending == 1]
        needed = sum(map(self.missing_pages, decoding))
        work = scheduler.schedule()
        preempted = before.keys() - scheduler.running
        assert not preempted or needed > free, "preempted without need"
        assert not preempted or before.keys() >= set(scheduler.running), "admitted though memory is short"
        skipped = sum(request.table.kv_len - before.get(request, 0) for request in scheduler.running)
        assert skipped == memory.shared_tokens - shared
        room = self.check_shares(work, [request for request in decoding if request not in preempted])
        if scheduler.waiting and room and not preempted and len(scheduler.running) < scheduler.max_num_seqs:
            assert self.missing_pages(scheduler.waiting[0]) > memory.num_free, "a place stays empty"
        self.decoding -= preempted
        seen.update(preempted=len(preempted), skipped=skipped)
        self.pages.clear(memory.take_soiled())
        stand = [min(accepted[i % len(accepted)], item.num_slots) if item.decides else 0 for i, item in enumerate(work)]
        return list(zip(work, stand, strict=True))

    def missing_pages(self, request: Request) -> int:
        """Pages that a request must get for all its tokens and its next block."""
        size = len(request.tokens) + self.scheduler.num_slots(request)
        return max(self.memory.pages_for(size) - len(request.table.pages), 0)

    def check_shares(self, work: list[Work], decoding: list[Request]) -> int:
        """Decoders first, then prompts in order: each leaves a quarter if it does not fit, and the first of those gets
        what nobody took. Returns what was left for others.
        """
        items = {item.request: item for item in work}
        assert len(items) == len(work), "a request is scheduled twice"
        assert {*self.requests[:1], *decoding} <= items.keys(), "a decoder or the oldest request is left out"
        spent = sum(items[request].num_tokens + items[request].num_slots for request in decoding)
        room = max(self.scheduler.max_num_batched_tokens - spent, MIN_CHUNK)
        makers: list[Request] = []
        parts: dict[Request, int] = {}
        for request in [request for request in self.scheduler.running if request not in decoding]:
            waits = any(self.makes_page(maker, request) for maker in makers)
            assert (request in items) == (room > 0 and not waits), "a prompt is passed over, or computed twice"
            seen["waited"] += waits
            if request in items:
                spare = room // 4 if request.pending > room >= MIN_CHUNK else 0
                parts[request] = min(request.pending, room - spare)
                room -= parts[request]
                makers.append(request)
        for request in [request for request, part in parts.items() if part < request.pending][:1]:
            parts[request] = min(request.pending, parts[request] + room)
        assert {r: (items[r].num_tokens, items[r].num_slots) for r in parts} == {r: (n, 0) for r, n in parts.items()}
        return room

    def makes_page(self, maker: Request, request: Request) -> bool:
        """Whether `maker` is filling the page that `request` needs next."""
        start, end = request.table.kv_len, request.table.kv_len + SIZE
        if self.memory.cache is None or start % SIZE or end >= len(request.tokens) or end > len(maker.tokens):
            return False
        alike = self.scheduler.keeps_context(maker) == self.scheduler.keeps_context(request)
        here = maker.table.kv_len // SIZE * SIZE == start and maker.table.node == request.table.node
        return alike and here and maker.tokens[:end] == request.tokens[:end]

    def compute(self, plan: Plan) -> list[list[Row]]:
        """The target's pass: pending tokens and drafts, those that will be rejected included."""
        users = Counter(page for request in self.requests for page in request.table.pages)
        rows = []
        for item, stand in plan:
            request, end = item.request, item.request.table.kv_len + item.num_tokens
            assert end + item.num_slots <= len(request.table.pages) * SIZE, "no room for the block"
            assert item.decides == (end == len(request.tokens))
            assert item.num_slots <= (self.scheduler.draft_len if item.decides and request.params.speculative else 0)
            assert request.num_generated + item.num_slots + item.decides <= request.max_tokens
            if item.num_slots:
                self.publish(request)
                assert request.table.draft_context_len == request.table.kv_len
            drafts = continuation(request.tokens[:end], max(stand, 0)) + [ord("z")] * (item.num_slots - max(stand, 0))
            rows.append(self.pages.write(request, [*request.tokens[:end], *drafts]))
            assert all(users[page] == 1 for page, _, _ in rows[-1]), "a shared page is written"
        return rows

    def deliver(self, plan: Plan) -> None:
        for item, stand in plan:
            request, table = item.request, item.request.table
            if stand == NOT_FINITE:
                self.memory.forget(table)
                used = {page for other in self.requests if other is not request for page in other.table.pages}
                self.pages.clear(set(table.pages) - used)
                self.remove(request)
                request.fail("not finite")
            elif item.decides:
                request.append(continuation(request.tokens, stand + 1))
                self.decoding.add(request)

    def commit(self, plan: Plan, rows: list[list[Row]]) -> None:
        """Context of plainly decoded tokens may be written later: when it is wanted, when it is much, at the end."""
        for (item, stand), written in zip(plan, rows, strict=True):
            request, keeps = item.request, self.scheduler.keeps_context(item.request)
            if request.error:
                continue
            size = min(item.num_tokens + stand, request.pending)
            self.memory.commit(request.table, size)
            self.memory.rollback(request.table, len(request.tokens))
            assert len(request.table.pages) <= self.memory.pages_for(len(request.tokens)), "rejected drafts keep a page"
            late = self.late.setdefault(request, [])
            late += written[:size]
            plain = item.num_tokens == 1 and not item.num_slots
            if not keeps or not plain or len(late) > 3 * SIZE or request.finished:
                self.publish(request)
        for item, _ in plan:
            if item.request.finished:
                self.remove(item.request)

    def publish(self, request: Request) -> None:
        rows, keeps = self.late.pop(request, []), self.scheduler.keeps_context(request)
        for page, offset, text in rows if keeps else []:
            self.pages.context[page][offset] = text
        seen["published late"] += keeps and len(rows) > SIZE
        self.memory.publish(request.table, request.tokens, draft_context=keeps)

    def remove(self, request: Request) -> None:
        self.late.pop(request, None)
        self.scheduler.remove(request)

    @invariant()
    def check(self) -> None:
        scheduler, memory = self.scheduler, self.memory
        ended = [request for request in self.requests if request.finished]
        assert all(request.table == PageTable() for request in [*ended, *scheduler.waiting]), "pages are not given back"
        self.requests = [request for request in self.requests if not request.finished]
        assert [*scheduler.running, *scheduler.waiting] == self.requests, "not in the order of arrival"
        assert len(scheduler.running) <= scheduler.max_num_seqs
        memory.check_integrity([request.table for request in self.requests])
        for request in scheduler.running:
            table, keeps = request.table, scheduler.draft_len > 0 and request.params.speculative
            assert 0 <= table.kv_len < len(request.tokens) <= memory.capacity
            assert request not in self.decoding or request.pending == 1
            assert len(table.pages) <= memory.pages_for(len(request.tokens) + scheduler.draft_len)
            late = len(self.late.get(request, ()))
            assert table.draft_context_len == (table.kv_len - late if keeps else 0)
            for place, (page, offset, text) in enumerate(rows_of(table, request.tokens[: table.kv_len])):
                assert self.pages.keys[page].get(offset) == text, "a table reads what another text wrote"
                written = place >= table.draft_context_len or self.pages.context[page].get(offset) == text
                assert written, "the draft's context has a hole"

    def teardown(self) -> None:
        """The oldest runs in every step, so all end after as many steps as they would need one after another."""
        if not hasattr(self, "requests"):
            return
        bound = sum(r.max_tokens - r.num_generated + len(r.tokens) // (MIN_CHUNK * 3 // 4) + 1 for r in self.requests)
        while self.requests:
            self.run([0], 1)
            bound -= 1
            assert bound >= 0, "requests starve"
        self.clear_cache()
        assert self.memory.reserve(PageTable(), self.memory.capacity)


def test_scheduler_and_memory_keep_their_promises_whatever_happens() -> None:
    """Case P2."""
    seen.clear()
    run_state_machine_as_test(Machine, settings=settings(max_examples=500, stateful_step_count=30))
    assert min(seen[event] for event in ("preempted", "skipped", "waited", "published late")) > 50, seen
