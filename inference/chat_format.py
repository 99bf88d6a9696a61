"""From chat messages to the tokens a model was trained to read.

The text is that of the model's own chat template. To know which tokens come from which message, the template is
rendered a second time with a marker in place of each content; the markers' places are those of the contents.

Two things deviate from tokenizing the template's text in one go, both on purpose:

- An answer that the model generated is put in as the tokens that it generated. Tokenizing its text again could give
  other tokens, and the KV after them would be lost.
- What looks like a special token in a content is cut in two before tokenizing, so that a user who types `<|im_end|>`
  writes these ten characters and does not end a turn.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from inference.errors import PromptRefused
from inference.requests import ChatMessage, Span

TEMPLATE_SOURCE = "template"

# For models that come without a chat template, which are seldom trained on chats: the common transcript form.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
PLAIN_STOP = ("\nUser:", "\nAssistant:", "\nSystem:")


@dataclass(frozen=True)
class _Part:
    source: str
    text: str
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True)
class _Turn:
    """A message as the template sees it; several of ours may share one."""

    role: str
    parts: tuple[_Part, ...]


@dataclass(frozen=True)
class _Placed:
    """Part of a content and where the rendered text has it."""

    part: _Part
    start: int
    end: int


class ChatFormat:
    """A model's way to write conversations. Safe from any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """`tokenizer` must be one of the Rust-backed ones."""
        self._tokenizer = tokenizer
        # Encoding through the backend changes no state, unlike the tokenizer around it, and so needs no lock.
        self._backend = tokenizer.backend_tokenizer
        self._template: str = tokenizer.get_chat_template() if tokenizer.chat_template else PLAIN_TEMPLATE
        self.stop: tuple[str, ...] = () if tokenizer.chat_template else PLAIN_STOP
        self._special = self._special_strings()
        self.end_of_turn = self._find_end_of_turn()

    def render(self, messages: Sequence[ChatMessage]) -> list[Span]:
        """Tokens of the conversation and of the beginning of the next answer, by source.

        Joined, the spans are the tokens of `apply_chat_template(..., add_generation_prompt=True)`, but for the two
        deviations that this module's docstring names. A token belongs to the source in which it begins; what no
        message wrote is "template". When the template changes contents beyond trimming them, all is one "template"
        span. A system message is put before the first user message when the template has no system role.
        Raises PromptRefused when the template refuses the conversation.
        """
        text, placed = self._place(messages)
        tokens = list(self._tokenize(text, placed))
        return [
            Span(source, tuple(token for _, token in run))
            for source, run in itertools.groupby(tokens, key=lambda entry: entry[0])
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a run of tokens, special tokens left out."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=True))

    def _place(self, messages: Sequence[ChatMessage]) -> tuple[str, list[_Placed]]:
        """The rendered text, and where the contents are in it."""
        refusal: Exception | None = None
        unplaced: str | None = None
        for turns in _arrangements(messages):
            try:
                text = self._render_text(turns)
                marked, markers = self._render_marked(turns)
            except jinja2.TemplateError as error:
                refusal = refusal or error
                continue
            parts = [part for turn in turns for part in turn.parts]
            placed = _match(text, marked, markers, parts)
            if placed is not None:
                return text, placed
            unplaced = unplaced or text
        if unplaced is None:
            raise PromptRefused(f"the model's chat template refuses this conversation: {refusal}")
        return unplaced, []

    def _render_text(self, turns: Sequence[_Turn]) -> str:
        contents = ["".join(part.text for part in turn.parts) for turn in turns]
        return self._apply(turns, contents)

    def _render_marked(self, turns: Sequence[_Turn]) -> tuple[str, list[str]]:
        salt = secrets.token_hex(8)
        numbers = itertools.count()
        marked = [[f"[{salt}:{next(numbers)}]" for _ in turn.parts] for turn in turns]
        text = self._apply(turns, ["".join(markers) for markers in marked])
        return text, [marker for markers in marked for marker in markers]

    def _apply(self, turns: Sequence[_Turn], contents: Sequence[str]) -> str:
        messages: list[dict[str, Any]] = [
            {"role": turn.role, "content": content} for turn, content in zip(turns, contents, strict=True)
        ]
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=False,
            )
        )

    def _tokenize(self, text: str, placed: Sequence[_Placed]) -> Iterator[tuple[str, int]]:
        """Tokens with their sources."""
        known = [place for place in placed if place.part.tokens is not None]
        start = 0
        for place in known:
            yield from self._tokenize_text(text, start, place.start, placed)
            yield from ((place.part.source, token) for token in place.part.tokens or ())
            start = place.end
        yield from self._tokenize_text(text, start, len(text), placed)

    def _tokenize_text(
        self, text: str, start: int, end: int, placed: Sequence[_Placed]
    ) -> Iterator[tuple[str, int]]:
        cuts = self._forgery_cuts(text, start, end, placed)
        for piece_start, piece_end in itertools.pairwise([start, *cuts, end]):
            encoding = self._backend.encode(text[piece_start:piece_end], add_special_tokens=False)
            position = 0
            for token, (offset, offset_end) in zip(encoding.ids, encoding.offsets, strict=True):
                # Some tokenizers leave a token's leading space out of its offsets.
                position = min(position, offset)
                yield _source_at(placed, piece_start + position), token
                position = offset_end

    def _forgery_cuts(self, text: str, start: int, end: int, placed: Sequence[_Placed]) -> list[int]:
        """Places within special tokens that a content wrote, wholly or in part."""
        cuts = set()
        for special in self._special:
            found = text.find(special, start, end)
            while found >= 0:
                if any(p.start < found + len(special) and found < p.end for p in placed):
                    cuts.add(found + 1)
                found = text.find(special, found + 1, end)
        return sorted(cuts)

    def _special_strings(self) -> list[str]:
        """Strings that become one token of a meaning: special tokens, and added ones that the template uses."""
        added = self._backend.get_added_tokens_decoder().values()
        return [
            token.content
            for token in added
            if len(token.content) > 1 and (token.special or token.content in self._template)
        ]

    def _find_end_of_turn(self) -> int | None:
        """The special token that the template puts after an answer, if it puts one."""
        messages = [
            ChatMessage("user", "user", "Hello"),
            ChatMessage("answer", "assistant", "Hello", tokens=(0,)),
            ChatMessage("next", "user", "Hello"),
        ]
        try:
            spans = self.render(messages)
        except PromptRefused:
            return None
        for span, following in itertools.pairwise(spans):
            if span.source == "answer":
                special = self._backend.get_added_tokens_decoder().get(following.tokens[0])
                return following.tokens[0] if special is not None and special.special else None
        return None


def _arrangements(messages: Sequence[ChatMessage]) -> Iterator[list[_Turn]]:
    """The conversation as it is, then in forms that stricter templates take."""
    turns = [
        _Turn(message.role, (_Part(message.source, message.text, message.tokens),)) for message in messages
    ]
    yield turns
    turns = _system_into_user(turns)
    yield turns
    yield _merged(turns)


def _system_into_user(turns: Sequence[_Turn]) -> list[_Turn]:
    """Without system turns: their parts come first in the first user turn."""
    system = [part for turn in turns if turn.role == "system" for part in turn.parts]
    others = [turn for turn in turns if turn.role != "system"]
    if not system:
        return others
    first = next((i for i, turn in enumerate(others) if turn.role == "user"), None)
    if first is None:
        return [_Turn("user", tuple(_joined(system))), *others]
    parts = _joined([*system, *others[first].parts])
    others[first] = replace(others[first], parts=tuple(parts))
    return others


def _merged(turns: Sequence[_Turn]) -> list[_Turn]:
    """Neighbours of the same role become one turn, for templates that insist on alternation."""
    return [
        _Turn(role, tuple(_joined([part for turn in run for part in turn.parts])))
        for role, run in itertools.groupby(turns, key=lambda turn: turn.role)
    ]


def _joined(parts: Iterable[_Part]) -> Iterator[_Part]:
    for number, part in enumerate(parts):
        if number and part.source != TEMPLATE_SOURCE:
            yield _Part(TEMPLATE_SOURCE, "\n\n")
        yield part


def _match(text: str, marked: str, markers: Sequence[str], parts: Sequence[_Part]) -> list[_Placed] | None:
    """Find the contents in `text` by their markers' places in `marked`.

    Templates may trim a content. Returns None when they do more, or leave one out.
    """
    pieces = []
    rest = marked
    for marker in markers:
        if rest.count(marker) != 1:
            return None
        before, rest = rest.split(marker)
        pieces.append(before)
    pieces.append(rest)

    placed = []
    position = len(pieces[0])
    if not text.startswith(pieces[0]):
        return None
    for part, following in zip(parts, pieces[1:], strict=True):
        content = _trimmed_as(text, position, part.text, following)
        if content is None:
            return None
        placed.append(_Placed(part, position, position + len(content)))
        position += len(content) + len(following)
    return placed if position == len(text) else None


def _trimmed_as(text: str, position: int, content: str, following: str) -> str | None:
    for candidate in (content, content.strip(), content.rstrip(), content.lstrip()):
        if text.startswith(candidate + following, position):
            return candidate
    return None


def _source_at(placed: Sequence[_Placed], position: int) -> str:
    for place in placed:
        if place.start <= position < place.end:
            return place.part.source
    return TEMPLATE_SOURCE
