"""Pages found again by what they hold: who may use them, and which are forgotten first."""

from __future__ import annotations

from server.kv import KVMemory, PageTable
from tests.server.test_kv import LETTERS, PAGES, SIZE


def filled(memory: KVMemory, tokens: list[int], *, draft_context: bool = True) -> PageTable:
    """A table whose tokens are all computed, cached pages used where there are any."""
    table = PageTable()
    memory.share(table, tokens, draft_context=draft_context)
    assert memory.reserve(table, len(tokens))
    memory.commit(table, len(tokens) - table.kv_len)
    memory.publish(table, tokens, draft_context=draft_context)
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
    memory.commit(table, 1)
    memory.publish(table, text, draft_context=True)
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
        memory.commit(table, len(text))
        memory.publish(table, text, draft_context=True)
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
