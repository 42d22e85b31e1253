"""Who owns which page of KV memory: one logical page table per request, for target and draft alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class PageTable:
    """A request's pages: page j holds positions [j * page_size, (j + 1) * page_size).

    Positions [0, kv_len) hold committed keys and values of the target, [0, draft_context_len) those of the draft's
    context; what lies behind in the pages is dead.
    """

    pages: list[int] = field(default_factory=list)
    kv_len: int = 0
    draft_context_len: int = 0


class KVMemory:
    """Hands out pages.

    Args:
        num_pages: pages of the pools.
        page_size: token positions per page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = set(range(num_pages))
        self._fresh: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Token positions in all pages."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def reserve(self, table: PageTable, num_tokens: int) -> bool:
        """Make room for positions [0, num_tokens); False, and nothing taken, when memory does not suffice."""
        needed = self.pages_for(num_tokens) - len(table.pages)
        if needed > len(self._free):
            return False
        for _ in range(needed):
            # The neighbour of the last page keeps a sequence in one run, which attention reads without a copy.
            following = table.pages[-1] + 1 if table.pages else -1
            page = following if following in self._free else min(self._free)
            self._free.remove(page)
            self._fresh.append(page)
            table.pages.append(page)
        return True

    def take_fresh(self) -> list[int]:
        """Pages handed out since the last call. They may hold NaN of their last owner: zero them before use."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def commit(self, table: PageTable, num_tokens: int, *, draft_context: bool) -> None:
        """Declare the next `num_tokens` positions valid, for the draft's context too if it was written."""
        table.kv_len += num_tokens
        if draft_context:
            table.draft_context_len += num_tokens
        assert table.kv_len <= len(table.pages) * self.page_size, "committed more than was reserved"
        assert table.draft_context_len in (0, table.kv_len), "draft context does not cover the committed tokens"

    def rollback(self, table: PageTable, num_tokens: int) -> None:
        """Give back pages past the first `num_tokens` positions: what was rejected there is dropped by length."""
        keep = self.pages_for(num_tokens)
        self._free.update(table.pages[keep:])
        del table.pages[keep:]

    def release(self, table: PageTable) -> None:
        """Give back everything."""
        table.kv_len = table.draft_context_len = 0
        self.rollback(table, 0)

    def check_integrity(self, tables: Iterable[PageTable]) -> None:
        """Assert that every page is free or owned exactly once."""
        owned = [page for table in tables for page in table.pages]
        assert len(owned) == len(set(owned)), "a page is owned twice"
        assert self._free.isdisjoint(owned), "a page is owned and free"
        assert len(owned) + len(self._free) == self.num_pages, "a page is lost"
