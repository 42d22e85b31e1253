"""Who owns which page of KV memory: one logical page table per request, for target and draft alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from server.prefix_cache import ROOT, Content, PrefixCache


@dataclass
class PageTable:
    """A request's pages: page j holds positions [j * page_size, (j + 1) * page_size).

    Positions [0, kv_len) hold committed keys and values of the target, [0, draft_context_len) those of the draft's
    context; what lies behind in the pages is dead. The pages of positions [0, cached_len) are full, known to the prefix
    cache and never written again: they may be shared with other tables.

    Attributes:
        node: what the prefix cache calls the last page it knows.
    """

    pages: list[int] = field(default_factory=list)
    kv_len: int = 0
    draft_context_len: int = 0
    cached_len: int = 0
    node: int = ROOT


class KVMemory:
    """Hands out pages.

    Args:
        num_pages: pages of the pools.
        page_size: token positions per page.
        prefix_cache: keep full pages after their owners, for requests that begin with the same tokens.

    Attributes:
        shared_tokens: positions that tables found in the cache and did not have to compute, in all.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = True) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.cache = PrefixCache() if prefix_cache else None
        self.shared_tokens = 0
        self._users: Counter[int] = Counter()
        self._free = list(reversed(range(num_pages)))
        self._blank = [True] * num_pages  # nobody has written to them
        self._soiled: list[int] = []

    @property
    def num_free(self) -> int:
        """Pages that can be had, cached ones that nobody uses included."""
        return len(self._free) + (self.cache.num_idle if self.cache else 0)

    @property
    def capacity(self) -> int:
        """Token positions in all pages."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def share(self, table: PageTable, tokens: Sequence[int], *, draft_context: bool) -> None:
        """Let a table use cached pages for its next tokens, in place of pages of its own that are still empty.

        The last token is left to be computed: its scores are wanted.

        Args:
            tokens: all tokens of the request.
            draft_context: whether the pages must hold the draft's context too.
        """
        while self.cache and (content := self.wanted(table, tokens, draft_context=draft_context)):
            node = self.cache.find(content)
            if node is None:
                return
            end = table.kv_len + self.page_size
            self._use(node.page)
            index = table.kv_len // self.page_size
            for page in table.pages[index : index + 1]:
                self._leave(page)
            table.pages[index : index + 1] = [node.page]
            table.node, table.kv_len, table.cached_len = node.number, end, end
            table.draft_context_len = end if draft_context else 0
            self.shared_tokens += self.page_size

    def wanted(self, table: PageTable, tokens: Sequence[int], *, draft_context: bool) -> Content | None:
        """What a page must hold to serve the next tokens; None inside a page and for the last token."""
        if table.kv_len > table.cached_len or table.kv_len + self.page_size >= len(tokens):
            return None
        return self.next_page(table, tokens, draft_context=draft_context)

    def next_page(self, table: PageTable, tokens: Sequence[int], *, draft_context: bool) -> Content | None:
        """What the first page that is not cached will hold; None if the tokens do not fill it."""
        start = table.cached_len
        if start + self.page_size > len(tokens):
            return None
        return Content(table.node, draft_context, tuple(tokens[start : start + self.page_size]))

    def reserve(self, table: PageTable, num_tokens: int) -> bool:
        """Make room for positions [0, num_tokens); False, and nothing taken, when memory does not suffice."""
        needed = self.pages_for(num_tokens) - len(table.pages)
        if needed > self.num_free:
            return False
        while self.cache and needed > len(self._free):
            self._free.append(self.cache.forget_oldest())
        for _ in range(needed):
            table.pages.append(self._take())
        return True

    def take_soiled(self) -> list[int]:
        """Pages handed out since the last call that may hold NaN of an earlier owner: zero them before use."""
        soiled, self._soiled = self._soiled, []
        return soiled

    def soil(self, pages: Iterable[int]) -> None:
        """Somebody writes to these, now or soon, who does not own them."""
        for page in pages:
            self._blank[page] = False

    def commit(self, table: PageTable, num_tokens: int) -> None:
        """Declare the target's keys and values of the next `num_tokens` positions valid."""
        end = table.kv_len + num_tokens
        assert end <= len(table.pages) * self.page_size, "committed more than was reserved"
        table.kv_len = end

    def publish(self, table: PageTable, tokens: Sequence[int], *, draft_context: bool) -> None:
        """Let others find the pages that are full.

        Args:
            tokens: all tokens of the request, under which pages are found.
            draft_context: the draft's context of all that is committed has been written too. What is never written for
                a request is found by others like it.
        """
        table.draft_context_len = table.kv_len if draft_context else 0
        while self.cache and table.cached_len + self.page_size <= table.kv_len:
            content = self.next_page(table, tokens, draft_context=draft_context)
            assert content, "committed more than the request has tokens"
            index = table.cached_len // self.page_size
            known = self.cache.add(content, table.pages[index])
            if known.page != table.pages[index]:  # another request computed the same meanwhile
                self._use(known.page)
                self._leave(table.pages[index])
                table.pages[index] = known.page
            table.node, table.cached_len = known.number, table.cached_len + self.page_size

    def rollback(self, table: PageTable, num_tokens: int) -> None:
        """Give back pages past the first `num_tokens` positions: what was rejected there is dropped by length."""
        keep = self.pages_for(num_tokens)
        for page in reversed(table.pages[keep:]):
            self._leave(page)
        del table.pages[keep:]

    def release(self, table: PageTable) -> None:
        """Give back everything. Full pages stay in the prefix cache until their room is needed."""
        self.rollback(table, 0)
        table.kv_len = table.draft_context_len = table.cached_len = 0
        table.node = ROOT

    def forget(self, table: PageTable) -> None:
        """Let nobody else find the pages of this table: what they hold is not to be trusted."""
        if self.cache:
            for page in table.pages:
                self.cache.forget(page)

    def clear_cache(self) -> None:
        """Forget every cached page that nobody uses."""
        while self.cache and self.cache.num_idle:
            self._free.append(self.cache.forget_oldest())

    def _take(self) -> int:
        """A free page, the one that was given back last."""
        page = self._free.pop()
        if not self._blank[page]:
            self._soiled.append(page)
        self._blank[page] = False
        self._use(page)
        return page

    def _use(self, page: int) -> None:
        self._users[page] += 1
        if self.cache:
            self.cache.use(page)

    def _leave(self, page: int) -> None:
        self._users[page] -= 1
        if self._users[page] > 0:
            return
        del self._users[page]
        if self.cache and page in self.cache:
            self.cache.leave(page)
        else:
            self._free.append(page)

    def check_integrity(self, tables: Iterable[PageTable]) -> None:
        """Assert that every page is free, cached, or used as often as is counted; `tables` are all there are."""
        used = Counter(page for table in tables for page in table.pages)
        free, idle = set(self._free), self.cache.idle if self.cache else []
        assert len(self._free) == len(free), "a page is free twice"
        assert free.isdisjoint(used), "a page is used and free"
        assert free.isdisjoint(idle), "a page is cached and free"
        assert set(idle).isdisjoint(used), "a page is used and said to be idle"
        assert used == self._users, "users are miscounted"
        assert len(used) + len(free) + len(idle) == self.num_pages, "a page is lost"
