"""Pages: who uses which, and what they hold, against a simple model of both."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.kv import KVMemory, PageTable

SIZE, PAGES = 4, 10
LETTERS = range(10_000)


@dataclass
class Owner:
    """A sequence and its table; `reserved` pages, `committed` and `published` positions are the model's."""

    tokens: list[int]
    draft_context: bool
    table: PageTable = field(default_factory=PageTable)
    reserved: int = 0
    committed: int = 0
    published: int = 0


class Model:
    """Memory under test beside a picture of what is written where."""

    def __init__(self, prefix_cache: bool, texts: list[tuple[list[int], bool]]) -> None:
        self.memory = KVMemory(PAGES, SIZE, prefix_cache=prefix_cache)
        self.owners = [Owner(tokens, context) for tokens, context in texts]
        # page -> offset -> the text up to there, and whether the draft's context stands beside it
        self.written: dict[int, dict[int, tuple[list[int], bool]]] = {page: {} for page in range(PAGES)}

    def reserve(self, owner: Owner, amount: int) -> None:
        before = list(owner.table.pages)
        wanted = max(-(-amount // SIZE), owner.reserved)
        fits = wanted - owner.reserved <= self.memory.num_free
        assert self.memory.reserve(owner.table, amount) == fits
        owner.reserved = wanted if fits else owner.reserved
        assert owner.table.pages[: len(before)] == before
        for page in self.memory.take_soiled():
            self.written[page] = {}
        gained = owner.table.pages[len(before) :]
        assert not any(self.written[page] for page in gained), "a page still holds what its last owner wrote"

    def commit(self, owner: Owner, amount: int) -> None:
        step = min(amount, owner.reserved * SIZE - owner.committed, len(owner.tokens) - owner.committed)
        for position in range(owner.committed, owner.committed + step):
            page = owner.table.pages[position // SIZE]
            assert sum(page in other.table.pages for other in self.owners) == 1, "a shared page is written"
            self.written[page][position % SIZE] = owner.tokens[: position + 1], False
        self.memory.commit(owner.table, step)
        owner.committed += step

    def publish(self, owner: Owner) -> None:
        for position in range(owner.published, owner.committed):
            page = owner.table.pages[position // SIZE]
            assert sum(page in other.table.pages for other in self.owners) == 1, "a shared page is written"
            self.written[page][position % SIZE] = owner.tokens[: position + 1], owner.draft_context
        self.memory.publish(owner.table, owner.tokens, draft_context=owner.draft_context)
        owner.published = owner.committed

    def share(self, owner: Owner) -> None:
        self.memory.share(owner.table, owner.tokens, draft_context=owner.draft_context)
        gained = owner.table.kv_len - owner.committed
        assert gained >= 0
        assert gained == 0 or (gained % SIZE == 0 and owner.table.kv_len < len(owner.tokens))
        if gained:
            assert owner.published + gained == owner.table.kv_len, "shared behind what nobody knows yet"
            owner.published += gained
        owner.committed = owner.table.kv_len
        owner.reserved = max(owner.reserved, owner.committed // SIZE)

    def rollback(self, owner: Owner, amount: int) -> None:
        keep = max(amount, owner.committed)
        before = list(owner.table.pages)
        self.memory.rollback(owner.table, keep)
        owner.reserved = min(owner.reserved, -(-keep // SIZE))
        assert owner.table.pages == before[: owner.reserved]

    def release(self, owner: Owner) -> None:
        self.memory.release(owner.table)
        owner.reserved = owner.committed = owner.published = 0

    def check(self) -> None:
        memory, tables = self.memory, [owner.table for owner in self.owners]
        memory.check_integrity(tables)
        for owner in self.owners:
            assert len(owner.table.pages) == owner.reserved
            assert owner.table.kv_len == owner.committed
            assert owner.table.draft_context_len == (owner.published if owner.draft_context else 0)
            for position in range(owner.committed):
                text, context = self.written[owner.table.pages[position // SIZE]][position % SIZE]
                assert text == owner.tokens[: position + 1], "a table reads what another text wrote"
                waits = position >= owner.published or not owner.draft_context
                assert context or waits, "a table reads a page without the draft's context"
        assert memory.num_free == PAGES - len({page for table in tables for page in table.pages})


VERBS = st.sampled_from(
    ["reserve", "reserve", "commit", "commit", "commit", "publish", "publish", "share", "share", "rollback", "release"]
)
ACTIONS = st.lists(st.tuples(st.integers(0, 3), VERBS, st.integers(0, SIZE * (PAGES + 2))), min_size=20, max_size=80)
# Where each text leaves the common stem, how long it is, and whether its request drafts.
TEXTS = st.lists(
    st.tuples(st.integers(0, SIZE * 4), st.integers(1, SIZE * PAGES), st.booleans()), min_size=4, max_size=4
)


@settings(max_examples=400)
@given(st.booleans(), TEXTS, ACTIONS)
def test_tables_read_their_own_text_whatever_happens(
    prefix_cache: bool, branches: list[tuple[int, int, bool]], actions: list[tuple[int, str, int]]
) -> None:
    """Case P2."""
    texts = [([min(i, leaves) for i in range(size)], context) for leaves, size, context in branches]
    model = Model(prefix_cache, texts)
    for who, verb, amount in actions:
        owner = model.owners[who]
        if verb in ("release", "share", "publish"):
            getattr(model, verb)(owner)
        else:
            getattr(model, verb)(owner, amount)
        model.check()
    for owner in model.owners:
        model.release(owner)
    model.memory.clear_cache()
    assert model.memory.reserve(PageTable(), PAGES * SIZE)


def test_a_refused_reservation_takes_nothing() -> None:
    memory, table = KVMemory(4, SIZE), PageTable()
    assert memory.reserve(table, 3 * SIZE)
    assert not memory.reserve(table, 5 * SIZE)
    assert not memory.reserve(PageTable(), 2 * SIZE)
    assert (len(table.pages), memory.num_free, memory.capacity) == (3, 1, 4 * SIZE)


def test_nothing_is_shared_inside_a_page() -> None:
    """Another request may be ahead with the same tokens; only at the end of a page can its pages be taken."""
    memory, behind, ahead, text = KVMemory(10, SIZE), PageTable(), PageTable(), list(range(3 * SIZE))
    for table in (behind, ahead):
        memory.reserve(table, 3 * SIZE)
    for table, size in ((behind, SIZE // 2), (ahead, 2 * SIZE)):
        memory.commit(table, size)
        memory.publish(table, text, draft_context=False)
    memory.share(behind, text, draft_context=False)
    assert behind.kv_len == SIZE // 2
    memory.check_integrity([behind, ahead])


@pytest.mark.parametrize("num_tokens", [0, 1, SIZE, SIZE + 1])
def test_a_partly_used_page_is_kept(num_tokens: int) -> None:
    memory, table = KVMemory(8, SIZE), PageTable()
    memory.reserve(table, 4 * SIZE)
    memory.rollback(table, num_tokens)
    assert len(table.pages) == -(-num_tokens // SIZE)


def test_misuse_is_caught() -> None:
    memory, table, text = KVMemory(2, SIZE), PageTable(), [*LETTERS[:SIZE]]
    memory.reserve(table, SIZE)
    with pytest.raises(AssertionError, match="more than was reserved"):
        memory.commit(table, SIZE + 1)
    memory.commit(table, SIZE)
    with pytest.raises(AssertionError, match="than the request has tokens"):
        memory.publish(table, text[:-1], draft_context=False)


def test_broken_tables_are_caught() -> None:
    memory, table = KVMemory(3, SIZE), PageTable()
    memory.reserve(table, 2 * SIZE)
    for pages, complaint in (([0, 0], "miscounted"), ([0, 2], "used and free"), ([0], "miscounted"), ([], "miscount")):
        with pytest.raises(AssertionError, match=complaint):
            memory.check_integrity([PageTable(pages=pages)])
    twin = PageTable()
    memory.reserve(twin, SIZE)
    twin.pages = list(table.pages)
    with pytest.raises(AssertionError, match="miscounted"):
        memory.check_integrity([table, twin])


def test_only_pages_that_somebody_wrote_to_are_zeroed_again() -> None:
    memory, table = KVMemory(4, SIZE), PageTable()
    memory.soil([1])
    assert memory.reserve(table, 4 * SIZE)
    assert memory.take_soiled() == [1], "by somebody who does not own it, too"
    assert memory.take_soiled() == []
    memory.rollback(table, 2 * SIZE)
    assert memory.reserve(table, 4 * SIZE)
    assert sorted(memory.take_soiled()) == sorted(table.pages[2:])
