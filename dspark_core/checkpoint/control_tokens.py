"""Keep control tokens that somebody wrote into a message from becoming control tokens of the prompt.

A chat template glues its own scaffold (`<|im_start|>user` and the like) and the messages into one text. If a
message itself spells `<|im_end|>`, that must not end the turn. So every control token inside a message is
swapped for one private-use character before rendering. After rendering, the control tokens still spelled out
are the template's own. They get secret names that only a second copy of the tokenizer knows, the private-use
characters turn back into what the message said, and that copy encodes the text in one go: it finds control
tokens by their secret names, so the message's spelling is ordinary text to it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from functools import cached_property
from itertools import chain
from typing import Any

import tokenizers

from dspark_core.errors import RequestError

# The two supplementary private-use planes.
_PRIVATE_USE = range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)


class ControlTokens:
    """The control tokens of one tokenizer.

    Attributes:
        ids: control token -> id.
    """

    def __init__(self, backend: tokenizers.Tokenizer, ids: Mapping[str, int]) -> None:
        self.ids = dict(ids)
        self._backend = backend
        longest_first = sorted(map(re.escape, self.ids), key=len, reverse=True)
        self._pattern = re.compile("|".join(longest_first) or r"(?!)")
        self._secret_names = {token: f"\U0010fff0{secrets.token_hex(16)}\U0010fff1" for token in self.ids}

    def hide(self, messages: Any) -> tuple[Any, dict[str, str]]:
        """Swap the control tokens in all strings of `messages` for private-use characters.

        Returns:
            A copy of the messages, and private-use character -> control token (empty: nothing was swapped).

        Raises:
            RequestError: the messages already use every private-use character, or are nested too deeply.
        """
        try:
            return self._hide(messages)
        except RecursionError:
            raise RequestError("messages or what belongs to them is nested too deeply", "messages") from None

    def _hide(self, messages: Any) -> tuple[Any, dict[str, str]]:
        text = json.dumps(messages, ensure_ascii=False)
        spelled = [token for token in self.ids if json.dumps(token, ensure_ascii=False)[1:-1] in text]
        used = set(text) if spelled else set()
        free = (chr(code) for code in chain(*_PRIVATE_USE) if chr(code) not in used)
        stand_ins = dict(zip(spelled, free, strict=False))
        if len(stand_ins) < len(spelled):
            raise RequestError("messages use too many private-use characters", "messages")
        if not spelled:
            return messages, {}
        return self._swap(messages, stand_ins), {character: token for token, character in stand_ins.items()}

    def _swap(self, value: Any, stand_ins: Mapping[str, str]) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda match: stand_ins[match[0]], value)
        if isinstance(value, list):
            return [self._swap(item, stand_ins) for item in value]
        if isinstance(value, dict):
            return {self._swap(key, stand_ins): self._swap(item, stand_ins) for key, item in value.items()}
        return value

    def encode(self, rendered: str, hidden: Mapping[str, str]) -> list[int]:
        """Encode a rendered prompt; what `hidden` stands for becomes ordinary text.

        Args:
            rendered: the template's output.
            hidden: private-use character -> control token, from `hide`.
        """
        if not hidden:
            return list(self._backend.encode_batch([rendered], add_special_tokens=False)[0].ids)
        text = self._pattern.sub(lambda match: self._secret_names[match[0]], rendered)
        for character, token in hidden.items():
            text = text.replace(character, token)
        return list(self._renamed.encode_batch([text], add_special_tokens=False)[0].ids)

    @cached_property
    def _renamed(self) -> tokenizers.Tokenizer:
        """The same tokenizer, except that its control tokens are spelled with their secret names."""
        state = json.loads(self._backend.to_str())
        names, model = self._secret_names, state["model"]
        for added in state["added_tokens"]:
            added["content"] = names.get(added["content"], added["content"])
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(token, token): id_ for token, id_ in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            # A merge that spells a control token would need its old name, and text must not reach it anyway.
            model["merges"] = [pair for pair in model["merges"] if not {*pair, "".join(pair)} & names.keys()]
        state["post_processor"] = None
        renamed = tokenizers.Tokenizer.from_str(json.dumps(state))
        if any(renamed.token_to_id(names[token]) != id_ for token, id_ in self.ids.items()):
            raise RequestError("messages spell a control token, and it cannot be taken as text", "messages")
        return renamed
