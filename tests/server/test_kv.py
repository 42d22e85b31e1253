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
    """A sequence and its table; `reserved` pages and `committed` positions are the model's."""

    tokens: list[int]
    draft_context: bool
    table: PageTable = field(default_factory=PageTable)
    reserved: int = 0
    committed: int = 0


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
        for page in self.memory.take_fresh():
            self.written[page] = {}

    def commit(self, owner: Owner, amount: int) -> None:
        step = min(amount, owner.reserved * SIZE - owner.committed, len(owner.tokens) - owner.committed)
        for position in range(owner.committed, owner.committed + step):
            page = owner.table.pages[position // SIZE]
            assert sum(page in other.table.pages for other in self.owners) == 1, "a shared page is written"
            self.written[page][position % SIZE] = owner.tokens[: position + 1], owner.draft_context
        self.memory.commit(owner.table, owner.tokens, step, draft_context=owner.draft_context)
        owner.committed += step

    def share(self, owner: Owner) -> None:
        self.memory.share(owner.table, owner.tokens, draft_context=owner.draft_context)
        gained = owner.table.kv_len - owner.committed
        assert gained >= 0
        assert gained == 0 or (gained % SIZE == 0 and owner.table.kv_len < len(owner.tokens))
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
        owner.reserved = owner.committed = 0

    def check(self) -> None:
        memory, tables = self.memory, [owner.table for owner in self.owners]
        memory.check_integrity(tables)
        for owner in self.owners:
            assert len(owner.table.pages) == owner.reserved
            assert owner.table.kv_len == owner.committed
            assert owner.table.draft_context_len == (owner.committed if owner.draft_context else 0)
            for position in range(owner.committed):
                text, context = self.written[owner.table.pages[position // SIZE]][position % SIZE]
                assert text == owner.tokens[: position + 1], "a table reads what another text wrote"
                assert context or not owner.draft_context, "a table reads a page without the draft's context"
        assert memory.num_free == PAGES - len({page for table in tables for page in table.pages})


VERBS = st.sampled_from(["reserve", "reserve", "commit", "commit", "commit", "share", "share", "rollback", "release"])
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
    texts = [([min(i, leaves) for i in range(size)], context) for leaves, size, context in branches]
    model = Model(prefix_cache, texts)
    for who, verb, amount in actions:
        owner = model.owners[who]
        if verb in ("release", "share"):
            getattr(model, verb)(owner)
        else:
            getattr(model, verb)(owner, amount)
        model.check()
    for owner in model.owners:
        model.release(owner)
    model.memory.clear_cache()
    assert model.memory.reserve(PageTable(), PAGES * SIZE)


def filled(memory: KVMemory, tokens: list[int], *, draft_context: bool = True) -> PageTable:
    """A table whose tokens are all computed, cached pages used where there are any."""
    table = PageTable()
    memory.share(table, tokens, draft_context=draft_context)
    assert memory.reserve(table, len(tokens))
    memory.commit(table, tokens, len(tokens) - table.kv_len, draft_context=draft_context)
    return table


def shared(memory: KVMemory, tokens: list[int], *, draft_context: bool = True) -> int:
    """How many positions of a text are cached."""
    table = PageTable()
    memory.share(table, tokens, draft_context=draft_context)
    found = table.kv_len
    memory.release(table)
    return found


def test_full_pages_outlive_their_owner() -> None:
    memory, text = KVMemory(PAGES, SIZE), [*LETTERS[: 3 * SIZE + 1]]
    first = filled(memory, text)
    pages = list(first.pages)
    memory.release(first)
    assert memory.num_free == PAGES
    again = filled(memory, text)
    assert again.pages[:3] == pages[:3]
    assert memory.shared_tokens == 3 * SIZE
    both = filled(memory, text)
    assert both.pages[:3] == pages[:3]
    assert both.pages[3] != again.pages[3], "a page that is not full has one owner"
    memory.check_integrity([again, both])


def test_the_last_token_is_always_computed() -> None:
    memory, text = KVMemory(PAGES, SIZE), [*LETTERS[: 2 * SIZE]]
    filled(memory, text)
    assert shared(memory, text) == SIZE
    assert shared(memory, [*text, 7]) == 2 * SIZE


def test_a_page_is_known_by_all_tokens_before_it() -> None:
    memory, text = KVMemory(PAGES, SIZE), [*LETTERS[: 3 * SIZE]]
    filled(memory, text)
    assert shared(memory, [99, *text[1:], 0]) == 0
    assert shared(memory, [*text[:SIZE], 99, *text[SIZE + 1 :], 0]) == SIZE
    assert shared(memory, [*text[SIZE:], 0]) == 0


def test_pages_without_the_drafts_context_serve_plain_requests_only() -> None:
    memory, text = KVMemory(PAGES, SIZE), [*LETTERS[: 2 * SIZE + 1]]
    filled(memory, text, draft_context=False)
    assert shared(memory, text) == 0
    assert shared(memory, text, draft_context=False) == 2 * SIZE
    filled(memory, text)
    assert shared(memory, text) == 2 * SIZE
    assert shared(memory, [*text, 0], draft_context=False) == 2 * SIZE


def test_the_longest_unused_is_forgotten_first_and_from_its_end() -> None:
    memory = KVMemory(6, SIZE)
    old, young = [*LETTERS[: 3 * SIZE]], [*LETTERS[100 : 100 + 3 * SIZE]]
    for text in (old, young):
        memory.release(filled(memory, text))
    table = PageTable()
    assert memory.reserve(table, 2 * SIZE)
    assert (shared(memory, [*old, 0]), shared(memory, [*young, 0])) == (SIZE, 3 * SIZE)
    assert shared(memory, [*old, 0]) == SIZE, "a use makes it young"
    assert memory.reserve(table, 4 * SIZE)
    assert (shared(memory, [*old, 0]), shared(memory, [*young, 0])) == (SIZE, SIZE)


def test_a_page_in_use_is_never_forgotten() -> None:
    memory, text = KVMemory(4, SIZE), [*LETTERS[: 3 * SIZE]]
    table = filled(memory, text)
    assert not memory.reserve(PageTable(), 2 * SIZE)
    assert memory.reserve(PageTable(), SIZE)
    assert shared(memory, [*text, 0]) == 3 * SIZE
    assert table.kv_len == 3 * SIZE


def test_nothing_is_shared_from_the_middle_of_a_page() -> None:
    memory, text, table = KVMemory(PAGES, SIZE), [*LETTERS[: 3 * SIZE]], PageTable()
    memory.reserve(table, len(text))
    memory.commit(table, text, 1, draft_context=True)
    filled(memory, text)
    memory.share(table, text, draft_context=True)
    assert table.kv_len == 1


def test_plain_requests_use_pages_with_the_drafts_context() -> None:
    memory, text = KVMemory(PAGES, SIZE), [*LETTERS[: 2 * SIZE + 1]]
    memory.release(filled(memory, text))
    assert shared(memory, text, draft_context=False) == 2 * SIZE


def test_a_short_text_with_context_does_not_hide_a_long_one_without() -> None:
    memory, text = KVMemory(PAGES, SIZE), [*LETTERS[: 4 * SIZE + 1]]
    filled(memory, text, draft_context=False)
    filled(memory, text[: SIZE + 1])
    assert shared(memory, text, draft_context=False) == 4 * SIZE
    assert shared(memory, text) == SIZE


def test_forgotten_pages_are_not_found_and_come_back_when_they_are_left() -> None:
    memory, text = KVMemory(4, SIZE), [*LETTERS[: 2 * SIZE + 1]]
    table, twin = filled(memory, text), PageTable()
    memory.share(twin, text, draft_context=True)
    memory.forget(table)
    assert shared(memory, text) == 0
    memory.check_integrity([table, twin])
    for other in (table, twin):
        memory.release(other)
    assert memory.cache
    assert (memory.num_free, memory.cache.num_idle) == (4, 0)


def test_without_the_cache_nothing_is_shared() -> None:
    memory, text = KVMemory(PAGES, SIZE, prefix_cache=False), [*LETTERS[: 2 * SIZE + 1]]
    filled(memory, text)
    assert shared(memory, text) == 0
    assert memory.next_page(PageTable(), text, draft_context=True)


def test_what_two_computed_at_once_is_known_once() -> None:
    memory, text = KVMemory(PAGES, SIZE), [*LETTERS[: 2 * SIZE + 1]]
    tables = [PageTable(), PageTable()]
    for table in tables:
        memory.reserve(table, len(text))
    for table in tables:
        memory.commit(table, text, len(text), draft_context=True)
    memory.check_integrity(tables)
    assert tables[0].pages[:2] == tables[1].pages[:2], "one of the two is given back"
    assert tables[0].node == tables[1].node, "what follows is found by both"
    for table in tables:
        memory.release(table)
    assert memory.cache
    assert memory.cache.num_idle == 2


def test_numbers_are_not_used_again() -> None:
    """Two texts of one number would find each other's continuations."""
    memory = KVMemory(4, SIZE)
    first, parent, child, new, more = ([letter] * SIZE for letter in (1, 2, 3, 9, 7))
    memory.release(filled(memory, first))
    memory.release(filled(memory, [*parent, *child]))
    memory.release(filled(memory, [*new, *more]))  # takes the place of the first
    assert shared(memory, [*first, 0]) == 0
    assert shared(memory, [*new, *more, 0]) == 2 * SIZE
    assert shared(memory, [*parent, *child, *more, 0]) == 2 * SIZE


def test_a_refused_reservation_takes_nothing() -> None:
    memory, table = KVMemory(4, SIZE), PageTable()
    assert memory.reserve(table, 3 * SIZE)
    assert not memory.reserve(table, 5 * SIZE)
    assert not memory.reserve(PageTable(), 2 * SIZE)
    assert (len(table.pages), memory.num_free, memory.capacity) == (3, 1, 4 * SIZE)


def test_a_sequence_grows_into_the_neighbouring_page() -> None:
    memory, table, other = KVMemory(8, SIZE), PageTable(), PageTable()
    memory.reserve(other, SIZE)
    memory.reserve(table, SIZE)
    memory.release(other)
    memory.reserve(table, 3 * SIZE)
    assert table.pages == [table.pages[0] + i for i in range(3)]


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
        memory.commit(table, [*text, 5], SIZE + 1, draft_context=False)
    with pytest.raises(AssertionError, match="than the request has tokens"):
        memory.commit(table, text[:-1], SIZE, draft_context=False)
    memory.commit(table, text, 2, draft_context=True)
    with pytest.raises(AssertionError, match="draft context"):
        memory.commit(table, text, 2, draft_context=False)


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
