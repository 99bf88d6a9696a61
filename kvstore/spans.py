"""Spans: which source the tokens of a session came from, and where they stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Span:
    """A run of tokens from one source.

    - `source`: a message's id, "system", "template", or "" when nobody said.
    - `length`: number of tokens.
    - `position`: position of the first token; the others follow without a gap.
    - `exact`: False when the KV was kept or moved although what came before it changed.
    - `pinned`: a mark that says that its pages were pinned (`KVStore.pin`).
    - `emphasis`: 0 or more; the higher, the later its pages are evicted.
    """

    source: str
    length: int
    position: int
    exact: bool = True
    pinned: bool = False
    emphasis: float = 0.0

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.position + self.length

    def continues(self, source: str, position: int, exact: bool) -> bool:
        """Whether tokens of `source` at `position` can be added to this span."""
        return (self.source, self.end, self.exact) == (source, position, exact)


def grown(span: Span, count: int) -> Span:
    return replace(span, length=span.length + count)


def labelled(spans: list[Span], sources: Sequence[tuple[str, int]], length: int) -> list[Span]:
    """Spans of the given (source, number of tokens), cut to `length` tokens at positions without gaps. Marks of spans
    that stay the same are kept."""
    marks = {(span.source, span.position): span for span in spans}
    result = []
    position = 0
    for source, count in sources:
        if count and position < length:
            old = marks.get((source, position))
            size = min(count, length - position)
            result.append(
                Span(source, size, position, True, bool(old and old.pinned), old.emphasis if old else 0.0)
            )
        position += count
    if position < length:
        result.append(Span("", length - position, position))
    return result


def cut_spans(spans: list[Span], length: int) -> None:
    """Keep the first `length` tokens of a list of spans, in place."""
    held = sum(span.length for span in spans)
    while held > length:
        last = spans.pop()
        held -= last.length
        if held < length:
            spans.append(replace(last, length=length - held))
            held = length
