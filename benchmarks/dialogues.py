"""The shared dialogues: real ones, of several topics, in English and Chinese.

They are read from ``KEEPWARM_DATA`` (default ``../shared/data``). Figures that are reported come from the ``final``
split, which nothing is tuned on: every fifth dialogue.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

DATA = Path(os.environ.get("KEEPWARM_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))

Dialogue = dict[str, Any]


def dialogues(language: Literal["en", "zh"], split: Literal["tuning", "final"]) -> Iterator[Dialogue]:
    """The dialogues of a split, in the file's order.

    Raises:
        SystemExit: the data are not there; says where they were looked for.
    """
    path = DATA / f"dialogues_{language}.jsonl"
    if not path.exists():
        raise SystemExit(f"There is no {path}: set KEEPWARM_DATA to the folder of the dialogues.")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if (number % 5 == 0) == (split == "final"):
                yield json.loads(line)


def stitched_turns(
    language: Literal["en", "zh"], split: Literal["tuning", "final"], skip: int
) -> Iterator[str]:
    """Turns of one dialogue after the other, user and assistant alternating, beginning at the skip-th dialogue."""
    for dialogue in islice(dialogues(language, split), skip, None):
        turns = dialogue["turns"]
        yield from (turn["text"] for turn in turns[: len(turns) // 2 * 2])
