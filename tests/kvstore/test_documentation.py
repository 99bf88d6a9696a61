"""The documentation of the store: its example runs, and what it names exists."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import kvstore
from kvstore import StoreConfig, TierConfig

PACKAGE = Path(kvstore.__file__).parent
TEXT = (PACKAGE.parent / "docs" / "kvstore.md").read_text(encoding="utf-8")


def test_the_example_runs(capsys: Any) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, "docs/kvstore.md", "exec"), names)
    names["store"].close()
    assert capsys.readouterr().out == "100 quantized\n"


def test_every_file_is_in_the_map() -> None:
    named = set(re.findall(r"`(\w+\.py)`", TEXT.partition("## Which file")[2]))
    assert named == {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}


def test_every_setting_is_in_the_tables() -> None:
    tables = TEXT.partition("## Settings")[2].partition("## Which file")[0]
    named = set(
        re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in tables.splitlines() if "|" in line))
    )
    settings = {field.name for config in (StoreConfig, TierConfig) for field in fields(config)}
    assert named == settings | {"StoreConfig", "TierConfig"}
