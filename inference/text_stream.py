"""From a growing list of tokens to text that can be shown at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# What decoders put for bytes that are no character, or not yet one.
REPLACEMENT = "\ufffd"
# No UTF-8 character is longer than four bytes, so at most this many one-byte tokens can still become one.
HELD_TOKENS = 4


@dataclass(frozen=True)
class Piece:
    """Text that became final, and the tokens read since the last piece."""

    text: str
    tokens: tuple[int, ...]


class TextStream:
    """Turns tokens into text that never has to be taken back.

    Two things are held back: bytes that may still become a character, and the beginning of what may become a stop
    string. At a stop string the text ends before it, and `stopped` is true.

    Decoding goes by two offsets, as in text-generation-inference and vLLM: the tokens before `_read` are text
    already, and those from `_prefix` on are decoded again with each new token, because a token's text can depend on
    the one before it (spaces, split characters).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        """`decode` gives the text of a run of tokens, special tokens left out."""
        self._decode = decode
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._prefix = 0
        self._read = 0
        self._held = ""  # decoded text that may be the beginning of a stop string
        self._unpublished: list[tuple[int, int]] = []  # token, and where in the text it begins
        self._text_length = 0  # characters decoded so far
        self.stopped = False

    def push(self, token: int) -> Piece | None:
        """Read one more token. Returns the text that became final with it, if any; never an empty one.

        Not to be called once `stopped` is true.
        """
        self._unpublished.append((token, self._text_length))
        self._tokens.append(token)
        self._add_text(self._decode_more())
        if self.stopped:
            return None
        final = len(self._held) - self._possible_stop()
        if final == 0:
            return None
        text, self._held = self._held[:final], self._held[final:]
        return Piece(text, self._take_tokens())

    def replay(self, tokens: Sequence[int]) -> None:
        """Read the tokens of an earlier run, whose text was published then. Ends early at a stop string."""
        for token in tokens:
            if self.stopped:
                break
            self.push(token)
        self._take_tokens()

    def finish(self) -> Piece:
        """What was held back, at the end of the answer; its text may be empty."""
        if not self.stopped:
            self._add_text(self._decode(self._tokens[self._prefix :])[len(self._read_text()) :])
        text, self._held = self._held, ""
        return Piece(text, self._take_tokens())

    def _add_text(self, text: str) -> None:
        self._text_length += len(text)
        self._held += text
        found = [self._held.find(stop) for stop in self._stop]
        if positions := [position for position in found if position >= 0]:
            cut = min(positions)
            end = self._text_length - len(self._held) + cut
            # Tokens wholly in the stop string or after it are not part of the answer.
            self._unpublished = [entry for entry in self._unpublished if entry[1] < end]
            self._held = self._held[:cut]
            self.stopped = True

    def _possible_stop(self) -> int:
        """Characters at the end of the held text that may be the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _take_tokens(self) -> tuple[int, ...]:
        tokens = tuple(token for token, _ in self._unpublished)
        self._unpublished = []
        return tokens

    def _read_text(self) -> str:
        return self._decode(self._tokens[self._prefix : self._read])

    def _decode_more(self) -> str:
        before = self._read_text()
        text = self._decode(self._tokens[self._prefix :])
        end = len(self._tokens)
        if text.endswith(REPLACEMENT):
            if end - self._read <= HELD_TOKENS:
                return ""
            end, text = self._without_incomplete_tail(text)
        self._prefix, self._read = self._read, end
        return text[len(before) :]

    def _without_incomplete_tail(self, text: str) -> tuple[int, str]:
        """Too many undecodable tokens for one character: give up on all but those that may still become one.

        A cut is right when the text of the two sides is that of the whole.
        """
        for cut in range(len(self._tokens) - HELD_TOKENS + 1, len(self._tokens)):
            head = self._decode(self._tokens[self._prefix : cut])
            tail = self._decode(self._tokens[cut:])
            if head + tail == text and not tail.strip(REPLACEMENT):
                return cut, head
        return len(self._tokens), text
