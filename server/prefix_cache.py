"""Which full pages of KV hold which tokens: found by content, and kept after their owners until the room is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ROOT = 0


class Content(NamedTuple):
    """What a page holds, with everything its keys and values depend on.

    Attributes:
        parent: node of the page before it, hence of all tokens before; ROOT for the first page.
        draft_context: whether the draft's context was written beside the target's keys and values.
        tokens: the page's own token ids.
    """

    parent: int
    draft_context: bool
    tokens: tuple[int, ...]


class Node(NamedTuple):
    """A page whose content is known. Numbers of nodes are never used again, so a forgotten parent finds no child."""

    number: int
    page: int


@dataclass
class _Entry:
    """A text's number, and its pages: at most one with the draft's context and one without."""

    number: int
    pages: dict[bool, int] = field(default_factory=dict)


class PrefixCache:
    """A tree of pages by content. Compared by the tokens themselves: no two prompts are ever mistaken for each other.

    Whoever uses a page uses those before it too, and gives back the later ones first. So the page idle for longest
    has no child in use, and long prefixes are forgotten from their end.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, tuple[int, ...]], _Entry] = {}
        self._contents: dict[int, Content] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._count = ROOT

    def __contains__(self, page: int) -> bool:
        return page in self._contents

    @property
    def idle(self) -> Sequence[int]:
        """Pages that are known and that nobody uses, the one idle for longest first."""
        return list(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def find(self, content: Content) -> Node | None:
        """The page with this content; without a need for the draft's context, one with it will do too."""
        entry = self._entries.get((content.parent, content.tokens))
        if entry is None:
            return None
        page = entry.pages.get(True)
        if page is None and not content.draft_context:
            page = entry.pages.get(False)
        return None if page is None else Node(entry.number, page)

    def add(self, content: Content, page: int) -> Node:
        """Make a page known; if another has the same content, that one stays the known one and is returned."""
        key = content.parent, content.tokens
        if key not in self._entries:
            self._count += 1
            self._entries[key] = _Entry(self._count)
        entry = self._entries[key]
        if content.draft_context not in entry.pages:
            entry.pages[content.draft_context] = page
            self._contents[page] = content
        return Node(entry.number, entry.pages[content.draft_context])

    def use(self, page: int) -> None:
        """Keep a page from being forgotten: somebody uses it."""
        self._idle.pop(page, None)

    def leave(self, page: int) -> None:
        """Nobody uses this page any more; it may be forgotten after those that are idle already."""
        self._idle[page] = None

    def forget_oldest(self) -> int:
        """Forget the page that has been idle for longest, and return it."""
        page = next(iter(self._idle))
        self.forget(page)
        return page

    def forget(self, page: int) -> None:
        """Find this page no more, if it was known, used or not."""
        content = self._contents.pop(page, None)
        if content is None:
            return
        self._idle.pop(page, None)
        key = content.parent, content.tokens
        entry = self._entries[key]
        del entry.pages[content.draft_context]
        if not entry.pages:
            del self._entries[key]
