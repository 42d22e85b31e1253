"""Pages: who owns which, against a simple model of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.kv import KVMemory, PageTable

SIZE, PAGES = 16, 12
ACTIONS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["reserve", "commit", "rollback", "release"]),
        st.integers(0, SIZE * (PAGES + 2)),
    ),
    max_size=40,
)


@given(ACTIONS)
def test_every_page_has_one_owner_whatever_happens(actions: list[tuple[int, str, int]]) -> None:
    memory, tables = KVMemory(PAGES, SIZE), [PageTable() for _ in range(3)]
    reserved, committed = [0] * 3, [0] * 3  # the model: pages and valid positions of each table
    for who, verb, amount in actions:
        table, before = tables[who], list(tables[who].pages)
        if verb == "reserve":
            wanted = max(-(-amount // SIZE), reserved[who])
            fits = sum(reserved) - reserved[who] + wanted <= PAGES
            assert memory.reserve(table, amount) == fits
            reserved[who] = wanted if fits else reserved[who]
            assert table.pages[: len(before)] == before
        elif verb == "commit":
            step = min(amount, reserved[who] * SIZE - committed[who])
            memory.commit(table, step, draft_context=True)
            committed[who] += step
        elif verb == "rollback":
            keep = max(amount, committed[who])
            memory.rollback(table, keep)
            reserved[who] = min(reserved[who], -(-keep // SIZE))
            assert table.pages == before[: reserved[who]]
        else:
            memory.release(table)
            reserved[who] = committed[who] = 0
        assert [len(t.pages) for t in tables] == reserved
        assert [t.kv_len for t in tables] == [t.draft_context_len for t in tables] == committed
        assert memory.num_free == PAGES - sum(reserved)
        memory.check_integrity(tables)


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
    memory, table = KVMemory(2, SIZE), PageTable()
    memory.reserve(table, SIZE)
    with pytest.raises(AssertionError, match="more than was reserved"):
        memory.commit(table, SIZE + 1, draft_context=False)
    memory.release(table)
    memory.reserve(table, SIZE)
    memory.commit(table, 2, draft_context=True)
    with pytest.raises(AssertionError, match="draft context"):
        memory.commit(table, 2, draft_context=False)


def test_broken_tables_are_caught() -> None:
    memory, table = KVMemory(3, SIZE), PageTable()
    memory.reserve(table, 2 * SIZE)
    for pages, complaint in (([0, 0], "owned twice"), ([0, 2], "owned and free"), ([0], "lost")):
        with pytest.raises(AssertionError, match=complaint):
            memory.check_integrity([PageTable(pages=pages)])
