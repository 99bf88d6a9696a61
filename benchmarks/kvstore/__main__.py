"""What the KV store costs and what it keeps: ``python -m benchmarks.kvstore [--quick]``.

The dialogues are those of the "final" split, which nothing was tuned on.
"""

from __future__ import annotations

import torch

from benchmarks.kvstore import durability, memory, quality, replay, speed
from benchmarks.report import parse_quick, print_figures


def main() -> None:
    quick = parse_quick(__doc__)
    torch.set_num_threads(1)
    figures = []
    for part in (memory, speed, durability, replay, quality):
        figures += part.measure(quick)
    print_figures(figures)


if __name__ == "__main__":
    main()
