"""Which full pages of KV hold which tokens: found by content, and kept after their owners until the room is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
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


class PrefixCache:
    """A tree of pages by content. Compared by the tokens themselves: no two prompts are ever mistaken for each other.

    Whoever uses a page uses those before it too, and gives back the later ones first. So the page idle for longest
    has no child in use, and long prefixes are forgotten from their end.
    """

    def __init__(self) -> None:
        self._nodes: dict[Content, Node] = {}
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
        if not content.draft_context and (node := self._nodes.get(content._replace(draft_context=True))):
            return node
        return self._nodes.get(content)

    def add(self, content: Content, page: int) -> Node:
        """Make a page known; if another has the same content, that one stays the known one and is returned."""
        if node := self._nodes.get(content):
            return node
        self._count += 1
        node = self._nodes[content] = Node(self._count, page)
        self._contents[page] = content
        return node

    def use(self, page: int) -> None:
        """Keep a page from being forgotten: somebody uses it."""
        self._idle.pop(page, None)

    def leave(self, page: int) -> None:
        """Nobody uses this page any more; it may be forgotten after those that are idle already."""
        self._idle[page] = None

    def forget_oldest(self) -> int:
        """Forget the page that has been idle for longest, and return it."""
        page, _ = self._idle.popitem(last=False)
        del self._nodes[self._contents.pop(page)]
        return page
