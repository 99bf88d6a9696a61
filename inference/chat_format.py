"""From chat messages to the tokens a model was trained to read.

The text is that of the model's own chat template. To know which tokens come from which message, the template is
rendered a second time with a marker in place of each content; the markers' places are those of the contents. Where the
template changes a content, rendering that one among markers shows what it becomes.

Two things deviate from tokenizing the template's text in one go, both on purpose:

- An answer that the model generated is put in as the tokens that it generated, unless the template changes it.
  Tokenizing its text again could give other tokens, and the KV after them would be lost. Tokens that do not say the
  text are another model's, or the text was changed since: then the text counts.
- What looks like a special token in a content is cut in two before tokenizing, so that a user who types `<|im_end|>`
  writes these ten characters and does not end a turn. Where the places of the contents cannot be found (a template
  may repeat one, or let one decide what it makes of another), an invisible space is put in instead, before
  rendering: the model then reads `<`, the space, and `|im_end|>`.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from inference.errors import PromptRefused
from inference.requests import ChatMessage, Span

TEMPLATE_SOURCE = "template"
ZERO_WIDTH_SPACE = "\u200b"

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


@dataclass(frozen=True)
class _Rendering:
    """The template's text, the same with markers for contents, and where the contents are; None if unknown."""

    text: str
    marked: str
    placed: list[_Placed] | None


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
        self._vocabulary_end = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())
        self.end_of_turn = self._find_end_of_turn()

    def render(self, messages: Sequence[ChatMessage]) -> list[Span]:
        """Tokens of the conversation and of the beginning of the next answer, by source.

        Joined, the spans are the tokens of `apply_chat_template(..., add_generation_prompt=True)`, but for the two
        deviations that this module's docstring names. A token belongs to the source in which it begins; what no
        message wrote is "template". Of a content that the template changes, the span is what it became, with what
        the template puts in for its sake; when the contents' places cannot be found, all is one "template" span. A
        system message is put before the first user message when the template has no system role. Raises PromptRefused
        when the template refuses the conversation.
        """
        text, placed = self._place([self._with_own_tokens(message) for message in messages])
        tokens = list(self._tokenize(text, placed))
        return [
            Span(source, tuple(token for _, token in run))
            for source, run in itertools.groupby(tokens, key=lambda entry: entry[0])
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a run of tokens, special tokens left out."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=True))

    def _with_own_tokens(self, message: ChatMessage) -> ChatMessage:
        """The message, without its tokens where these do not say its text."""
        tokens = message.tokens
        if tokens is None:
            return message
        known = all(0 <= token < self._vocabulary_end for token in tokens)
        # Not cached: 8,192 tokens are decoded in 1 ms.
        if known and self.decode(tokens) == message.text:
            return message
        return replace(message, tokens=None)

    def _place(self, messages: Sequence[ChatMessage]) -> tuple[str, list[_Placed]]:
        """The rendered text, and where the contents are in it."""
        rendering = self._render(messages)
        if rendering.placed is None:
            rendering = self._render([self._defused(message) for message in messages])
        if rendering.placed is None and self._forges(rendering):
            raise PromptRefused("the model's chat template makes special tokens of what a message says")
        return rendering.text, rendering.placed or []

    def _render(self, messages: Sequence[ChatMessage]) -> _Rendering:
        """The first arrangement whose contents can be placed, else the first that the template accepts."""
        refusal: Exception | None = None
        unplaced: _Rendering | None = None
        for turns in _arrangements(messages):
            try:
                rendering = self._render_turns(turns)
            except jinja2.TemplateError as error:
                refusal = refusal or error
                continue
            if rendering.placed is not None:
                return rendering
            unplaced = unplaced or rendering
        if unplaced is None:
            raise PromptRefused(f"the model's chat template refuses this conversation: {refusal}")
        return unplaced

    def _render_turns(self, turns: Sequence[_Turn]) -> _Rendering:
        parts = [part for turn in turns for part in turn.parts]
        places = [(turn, part) for turn, it in enumerate(turns) for part in range(len(it.parts))]
        markers = _markers(len(parts))
        text, marked = self._apply(turns, [part.text for part in parts]), self._apply(turns, markers)
        placed = _match(text, marked, markers, parts, lambda number: self._changes(turns, *places[number]))
        return _Rendering(text, marked, placed)

    def _changes(self, turns: Sequence[_Turn], turn: int, part: int) -> Iterator[str]:
        """What the template may make of the content of a turn's part.

        First what it makes of it among the turns next to it, because that takes the same time however long the
        conversation is; then among all.
        """
        start = turn if turns[turn].role == "user" else max(0, turn - 1)
        for begin, end in ((start, turn + 2), (0, len(turns))):
            shown = turns[begin:end]
            number = sum(len(it.parts) for it in turns[begin:turn]) + part
            markers = _markers(sum(len(it.parts) for it in shown))
            contents = [*markers]
            contents[number] = turns[turn].parts[part].text
            try:
                text, marked = self._apply(shown, contents), self._apply(shown, markers)
            except jinja2.TemplateError:
                continue
            change = _changed_as(text, marked, markers[number])
            if change is not None:
                yield change

    def _defused(self, message: ChatMessage) -> ChatMessage:
        text = message.text
        for special in self._special:
            while special in text:
                text = text.replace(special, special[0] + ZERO_WIDTH_SPACE + special[1:])
        return message if text == message.text else replace(message, text=text, tokens=None)

    def _forges(self, rendering: _Rendering) -> bool:
        """Whether the contents brought special tokens, as when the template joins what it finds in them."""
        return any(
            rendering.text.count(special) > rendering.marked.count(special) for special in self._special
        )

    def _apply(self, turns: Sequence[_Turn], contents: Sequence[str]) -> str:
        """The template's text, with `contents` as those of the turns' parts."""
        rest = iter(contents)
        messages: list[dict[str, Any]] = [
            {"role": turn.role, "content": "".join(next(rest) for _ in turn.parts)} for turn in turns
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
        tokens = tuple(self._backend.encode("Hello", add_special_tokens=False).ids)
        messages = [
            ChatMessage("user", "user", "Hello"),
            ChatMessage("answer", "assistant", self.decode(tokens), tokens),
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


def _markers(count: int) -> list[str]:
    """Texts that nobody can have written. Of digits, because a template may change the case."""
    salt = secrets.randbits(64)
    return [f"[{salt}:{number}]" for number in range(count)]


def _match(
    text: str,
    marked: str,
    markers: Sequence[str],
    parts: Sequence[_Part],
    changes: Callable[[int], Iterable[str]],
) -> list[_Placed] | None:
    """Find the contents in `text` by their markers' places in `marked`.

    Templates may trim a content or change it: `changes` gives what one may have become. Returns None when the
    template leaves a content out or repeats it, or when contents and template do not make up the text exactly.
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
    for number, (part, following) in enumerate(zip(parts, pieces[1:], strict=True)):
        content = _trimmed_as(text, position, part.text, following)
        if content is None:
            found = (change for change in changes(number) if text.startswith(change + following, position))
            content = next(found, None)
            if content is None:
                return None
            part = replace(part, tokens=None)
        placed.append(_Placed(part, position, position + len(content)))
        position += len(content) + len(following)
    return placed if position == len(text) else None


def _trimmed_as(text: str, position: int, content: str, following: str) -> str | None:
    for candidate in (content, content.strip(), content.rstrip(), content.lstrip()):
        if text.startswith(candidate + following, position):
            return candidate
    return None


def _changed_as(text: str, marked: str, marker: str) -> str | None:
    """What stands in `text` in the place of `marker` in `marked`."""
    if marked.count(marker) != 1:
        return None
    before, after = marked.split(marker)
    if len(text) < len(before) + len(after) or not (text.startswith(before) and text.endswith(after)):
        return None
    return text[len(before) : len(text) - len(after)]


def _source_at(placed: Sequence[_Placed], position: int) -> str:
    for place in placed:
        if place.start <= position < place.end:
            return place.part.source
    return TEMPLATE_SOURCE
