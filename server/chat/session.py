"""A conversation: what was said, what is asked next, and how the answer is shown."""

from __future__ import annotations

from contextlib import closing
from typing import Any, Literal, cast

from rich.console import Console
from rich.text import Text

from server.chat.answer import Answer, printable
from server.chat.client import ChatError, Client

# As in the playground; each differs by more than its colour.
STYLES = {"accepted": "green", "corrected": "red underline", "bonus": "magenta bold", "plain": "dim"}
DraftUse = Literal["auto", "full", "off"]
SPECULATIVE: dict[DraftUse, bool | str] = {"auto": True, "full": "full", "off": False}  # as /generate has it
HELP = """\
/reset   begin a new conversation
/draft   auto, full or off: decode with the draft as far as it pays, with whole blocks, or without it
/help    this list
/exit    leave, as Ctrl-D does
Ctrl-C stops an answer; twice, it leaves."""


class Session:
    """Asks and shows.

    Args:
        client: the server.
        fields: of every request: sampling and limits.
        system: the system prompt, or None.
        out: for answers alone.
        notes: for everything else.
    """

    def __init__(self, client: Client, fields: dict[str, Any], system: str | None, out: Console, notes: Console):
        self.client, self.fields, self.out, self.notes = client, fields, out, notes
        self._beginning = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._beginning)
        self.draft: DraftUse = "auto"

    def ask(self, text: str) -> None:
        """Ask and print the answer as it comes. One that is interrupted (KeyboardInterrupt) is kept as far as it came.

        Raises:
            ChatError: the server refused or failed; the conversation is as it was before.
        """
        question = {"role": "user", "content": text}
        messages, use = [*self.messages, question], SPECULATIVE[self.draft]
        body = {**self.fields, "messages": messages, "speculative": use, "detail": True}
        answer, failed = Answer(), False
        try:
            with closing(self.client.generate(body)) as events:
                for event in events:
                    for piece, source in answer.add(event):
                        self.out.out(printable(piece), style=STYLES.get(source), highlight=False, end="")
        except ChatError:
            failed = True
            raise
        finally:
            if answer.tokens:
                self.out.out()
                self.note(answer.stats())
            if answer.text and not failed:
                self.messages += [question, {"role": "assistant", "content": answer.text}]

    def command(self, line: str) -> bool:
        """Do what a line that begins with / says; False to leave."""
        match line.strip():
            case "/exit":
                return False
            case "/reset":
                self.messages = list(self._beginning)
                self.note("a new conversation")
            case "/draft auto" | "/draft full" | "/draft off" as use:
                self.draft = cast(DraftUse, use.removeprefix("/draft "))
                self.note(f"draft: {self.draft}")
            case "/help":
                self.note(HELP)
            case unknown:
                expected = "expected /reset, /draft auto, /draft full, /draft off, /help or /exit"
                self.note(f"{printable(unknown)} is no command, {expected}")
        return True

    def note(self, text: str) -> None:
        """Something that is not the model's."""
        self.notes.out(text, style="dim", highlight=False)

    def legend(self) -> Text:
        """The sources in their styles."""
        return Text(" ").join(Text(source, style) for source, style in STYLES.items())
