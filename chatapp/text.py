"""What people write, made safe to store and to send."""

import re
import unicodedata

# Everything below U+0020 and in U+007F..U+009F but tab and line feed, and lone surrogates, which neither UTF-8 nor
# PostgreSQL can hold.
_UNSTORABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_LINE_ENDS = re.compile("\r\n?|\u2028|\u2029")


def storable(text: str) -> str:
    """Make control characters and half characters visible as U+FFFD."""
    return _UNSTORABLE.sub("\ufffd", text)


def clean_text(text: str) -> str:
    """The same, and normalise line ends to ``\\n``."""
    return storable(_LINE_ENDS.sub("\n", text))


def clean_line(text: str) -> str:
    """The same for a text of one line, such as a title."""
    return " ".join(clean_text(text).split())


def is_blank(text: str) -> bool:
    """Whether nothing of the text can be seen: only white space and format characters."""
    return all(unicodedata.category(character) in ("Zs", "Zl", "Zp", "Cc", "Cf") for character in text)


def title_from(text: str, limit: int = 60) -> str:
    """A conversation's title from its first message: its beginning, cut between words where it has any."""
    line = clean_line(text)
    if len(line) <= limit:
        return line
    head = line[:limit]
    words = head.rpartition(" ")[0]
    return (words if len(words) > limit // 2 else head).rstrip() + "…"
