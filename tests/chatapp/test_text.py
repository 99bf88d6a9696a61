"""What people write is stored as they meant it, and always storable."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatapp.text import clean_line, clean_text, is_blank, title_from

ANY_TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates too


@given(ANY_TEXT)
def test_cleaned_text_can_be_stored_and_is_stable(text: str) -> None:
    cleaned = clean_text(text)
    cleaned.encode()
    assert not any(ord(character) < 0x20 and character not in "\t\n" for character in cleaned)
    assert clean_text(cleaned) == cleaned


@given(st.text(st.characters(min_codepoint=0xA0, exclude_categories=("Cs", "Zl", "Zp"))))
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert clean_text(text) == text


def test_control_characters_are_shown_not_dropped() -> None:
    assert clean_text("a\x00b\x1b[31mc\td\r\ne\rf") == "a\ufffdb\ufffd[31mc\td\ne\nf"


def test_right_to_left_and_joined_characters_survive() -> None:
    text = "שלום \u202b٣ abc\u202c 👩‍👩‍👧 é"
    assert clean_text(text) == text


@pytest.mark.parametrize("text", ["", " ", "\n\t ", "\u200b\u200e", "\u3000"])
def test_what_cannot_be_seen_is_blank(text: str) -> None:
    assert is_blank(text)


@given(st.text())
def test_titles_are_one_short_line(text: str) -> None:
    title = title_from(text)
    assert "\n" not in title
    assert len(title) <= 61
    assert clean_line(title) == title


def test_titles_are_cut_between_words_where_there_are_any() -> None:
    assert title_from("How do I cook rice, and how long does it take on a small stove at home?") == (
        "How do I cook rice, and how long does it take on a small…"
    )
    assert title_from("天" * 100) == "天" * 60 + "…"
