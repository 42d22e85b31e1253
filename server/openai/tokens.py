"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from dspark_core.checkpoint.tokenizer import Tokenizer
from dspark_core.errors import RequestError
from server.fields import Fields, Text, TokenId
from server.openai.tools import spoken_arguments
from server.protocol import Json, token_text


class TokenizeRequest(Fields):
    """Body of POST /tokenize: a prompt or messages."""

    model_config = ConfigDict(extra="ignore")

    prompt: Text | None = None
    messages: Annotated[list[Any], Field(min_length=1)] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            found = "neither" if self.prompt is None else "both"
            raise ValueError(f"found {found}, expected exactly one of prompt and messages")
        return self

    def answer(self, tokenizer: Tokenizer, max_model_len: int) -> Json:
        """The ids, as generation would see them."""
        if self.messages is not None:
            messages, opened = spoken_arguments(self.messages), self.add_generation_prompt
            ids = tokenizer.encode_chat(messages, tools=self.tools or None, add_generation_prompt=opened)
        else:
            encode = tokenizer.encode if self.add_special_tokens else tokenizer.encode_plain
            ids = encode(self.prompt or "")
        texts = {"token_strs": [token_text(tokenizer, token_id) for token_id in ids]} if self.return_token_strs else {}
        return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, **texts}


class DetokenizeRequest(Fields):
    """Body of POST /detokenize."""

    model_config = ConfigDict(extra="ignore")

    tokens: list[TokenId]

    def answer(self, tokenizer: Tokenizer) -> Json:
        """The text, special tokens left out; RequestError for an id that does not exist."""
        if unknown := [token_id for token_id in self.tokens if token_id >= tokenizer.vocab_size]:
            expected = f"expected 0 to {tokenizer.vocab_size - 1}"
            raise RequestError(f"tokens: {unknown[0]} is outside the vocabulary, {expected}", "tokens")
        return {"prompt": tokenizer.decode(self.tokens)}
