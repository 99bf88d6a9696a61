"""Streaming text: what is shown never has to be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from inference.chat_format import ChatFormat
from inference.text_stream import HELD_TOKENS, Piece, TextStream
from tests.inference.conftest import tiny_tokenizer

TEXTS = ["Hello, world", "再见，世界", "😀👩‍👩‍👧🇩🇪", "naïve café ½", "  spaces \n\n lines ", "a😀b界c"]


def stream(
    decode: Any, tokens: Sequence[int], stop: Sequence[str] = ()
) -> tuple[list[Piece], Piece, TextStream]:
    text_stream = TextStream(decode, stop)
    pieces = []
    for token in tokens:
        if piece := text_stream.push(token):
            pieces.append(piece)
        if text_stream.stopped:
            break
    return pieces, text_stream.finish(), text_stream


def text_of(pieces: list[Piece], rest: Piece) -> str:
    return "".join(piece.text for piece in (*pieces, rest))


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=40))
@example(TEXTS[1])
@example(TEXTS[2])
@example(TEXTS[5])
@pytest.mark.parametrize("kind", ["smollm", "bytes"])
def test_pieces_are_whole_characters_and_add_up(smollm_tokenizer: Any, kind: str, text: str) -> None:
    tokenizer = smollm_tokenizer if kind == "smollm" else tiny_tokenizer()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    # SmolLM2 has no token for some bytes of very rare characters.
    assume(tokenizer.decode(tokens) == text)
    pieces, rest, _ = stream(ChatFormat(tokenizer).decode, tokens)
    assert text_of(pieces, rest) == text
    assert all(piece.text and not piece.text.endswith("\ufffd") for piece in pieces)
    assert [token for piece in (*pieces, rest) for token in piece.tokens] == tokens


BYTES = tiny_tokenizer()


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.integers(0, len(BYTES) - 1), max_size=24))
def test_bytes_that_are_no_text_add_up_too(tokens: list[int]) -> None:
    decode = ChatFormat(BYTES).decode
    pieces, rest, _ = stream(decode, tokens)
    assert text_of(pieces, rest) == decode(tokens)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_random_tokens_of_the_model_add_up(smollm_tokenizer: Any, data: Any) -> None:
    tokens = data.draw(st.lists(st.integers(0, len(smollm_tokenizer) - 1), max_size=16))
    decode = ChatFormat(smollm_tokenizer).decode
    pieces, rest, _ = stream(decode, tokens)
    assert text_of(pieces, rest) == smollm_tokenizer.decode(tokens, skip_special_tokens=True)


def byte_tokens(data: bytes) -> list[int]:
    """One token a byte, whatever the bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    return [BYTES.get_vocab()[letters[byte]] for byte in data]


def test_a_character_comes_with_its_last_byte() -> None:
    text_stream = TextStream(ChatFormat(BYTES).decode)
    tokens = byte_tokens("😀".encode())
    assert [text_stream.push(token) for token in tokens[:3]] == [None, None, None]
    assert text_stream.push(tokens[3]) == Piece("😀", tuple(tokens))


def test_undecodable_bytes_are_not_held_for_ever() -> None:
    text_stream = TextStream(ChatFormat(BYTES).decode)
    tokens = byte_tokens(b"\x80" * 40)
    held = 0
    for token in tokens:
        piece = text_stream.push(token)
        held = held + 1 - (len(piece.tokens) if piece else 0)
        assert held <= HELD_TOKENS


def test_an_incomplete_tail_comes_at_the_end() -> None:
    tokens = byte_tokens(b"ab\xf0\x9f")
    pieces, rest, _ = stream(ChatFormat(BYTES).decode, tokens)
    assert text_of(pieces, rest) == "ab\ufffd"
    assert rest == Piece("\ufffd", tuple(tokens[2:]))


def test_special_tokens_have_no_text() -> None:
    tokens = [*byte_tokens(b"a"), 1, *byte_tokens(b"b")]
    pieces, rest, _ = stream(ChatFormat(BYTES).decode, tokens)
    assert text_of(pieces, rest) == "ab"
    assert [token for piece in (*pieces, rest) for token in piece.tokens] == tokens


def test_a_possible_stop_string_is_held_back_and_released() -> None:
    pieces, rest, text_stream = stream(ChatFormat(BYTES).decode, byte_tokens(b"one\nUs two"), ["\nUser:"])
    assert [piece.text for piece in pieces][:4] == ["o", "n", "e", "\nUs "]
    assert text_of(pieces, rest) == "one\nUs two"
    assert not text_stream.stopped


def test_what_may_be_a_stop_string_is_shown_at_the_end() -> None:
    pieces, rest, _ = stream(ChatFormat(BYTES).decode, byte_tokens(b"one\nUse"), ["\nUser:"])
    assert rest.text == "\nUse"
    assert text_of(pieces, rest) == "one\nUse"


def test_text_and_tokens_end_before_the_stop_string() -> None:
    tokens = byte_tokens(b"one STOP two")
    pieces, rest, text_stream = stream(ChatFormat(BYTES).decode, tokens, ["STOP", "P t"])
    assert text_stream.stopped
    assert text_of(pieces, rest) == "one "
    assert [token for piece in (*pieces, rest) for token in piece.tokens] == tokens[:4]


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_where_the_first_begins(text: str, stops: list[str]) -> None:
    pieces, rest, text_stream = stream(ChatFormat(BYTES).decode, byte_tokens(text.encode()), stops)
    # The first to be complete ends the answer; of several complete at once, the one that begins first.
    for end in range(len(text) + 1):
        found = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if found:
            assert text_of(pieces, rest) == text[: min(found)]
            assert text_stream.stopped
            return
    assert text_of(pieces, rest) == text
    assert not text_stream.stopped


@settings(max_examples=100, deadline=None)
@given(text=st.text(min_size=1, max_size=12), data=st.data())
def test_replaying_what_was_published_goes_on_where_it_ended(text: str, data: Any) -> None:
    decode = ChatFormat(BYTES).decode
    tokens = byte_tokens(text.encode(errors="ignore"))
    pieces, rest, _ = stream(decode, tokens, ["ab"])
    heard = data.draw(st.integers(0, len(pieces)))
    published = [token for piece in pieces[:heard] for token in piece.tokens]
    resumed = TextStream(decode, ["ab"])
    resumed.replay(published)
    more = []
    for token in tokens[len(published) :]:
        if resumed.stopped:
            break
        if piece := resumed.push(token):
            more.append(piece)
    assert more == pieces[heard:]
    assert resumed.finish() == rest
