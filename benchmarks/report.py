"""How every benchmark is called and how it reports."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One figure: its value (None where this machine lacks what it needs), its target, and what it means.

    ``samples`` are the single measurements that it is the median of, where it is one.
    """

    name: str
    value: float | None
    target: str
    meaning: str
    samples: Sequence[float] = ()


def parse_quick(description: str | None) -> bool:
    """Read the command line; whether ``--quick`` (fewer repetitions, within 100 seconds) was given."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, within 100 seconds")
    return bool(parser.parse_args().quick)


def print_figures(figures: Sequence[Figure]) -> None:
    """Print a table for people, then one JSON object for programs as the last line."""
    print(f"\n{'figure':<22}{'value':>10}{'target':>10}{'smallest':>10}{'largest':>10}{'n':>6}  meaning")
    for figure in figures:
        spread = (
            f"{min(figure.samples):>10.2f}{max(figure.samples):>10.2f}{len(figure.samples):>6}"
            if figure.samples
            else " " * 26
        )
        value = "-" if figure.value is None else f"{figure.value:.4g}"
        print(f"{figure.name:<22}{value:>10}{figure.target:>10}{spread}  {figure.meaning}")
    print()
    print(json.dumps({figure.name: figure.value and round(figure.value, 5) for figure in figures}))


def median(samples: Sequence[float]) -> float | None:
    return statistics.median(samples) if samples else None
