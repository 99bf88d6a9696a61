"""Converts a GGUF file, once, into the folder form that loads in seconds.

transformers can load GGUF itself, but unpacks all weights each time. The converted folder holds float32 safetensors,
the configuration and the tokenizer with its chat template.

The folder is named after the file's hash. It is made under another name and renamed when complete, so a folder with
the right name is a whole one. A lock file keeps converters of the same file apart; the kernel releases the lock when a
converter dies, so whoever holds it may clear leftovers away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference.errors import ModelUnavailable
from inference.sources import Report, check_folder

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader
    from transformers import PreTrainedModel

GGUF_MAGIC = b"GGUF"
HASH_CHUNK = 8 * 1024 * 1024
FLOAT32_BYTES = 4
# Tokenizer and configuration files, and room for the file system's own needs.
SPACE_BESIDE_WEIGHTS = 64 * 1024 * 1024
# The shares of a conversion's time after which its steps end, measured on the default model.
READ_UNTIL, UNPACKED_UNTIL = 0.5, 0.8


def convert(path: Path, cache_dir: Path, report: Report) -> Path:
    """The folder under `cache_dir` with the converted model, made unless it is there.

    Waits for another process that converts the same file. Raises ModelUnavailable when the file is broken or of an
    architecture that transformers does not know, or the folder cannot be written; whatever `report` raises ends the
    conversion and leaves nothing behind.
    """
    digest = _sha256(path)
    folder = cache_dir / digest
    if _is_complete(folder):
        return folder
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f"{digest}.lock", report):
            if not _is_complete(folder):
                _convert_locked(path, folder, report)
    except OSError as error:
        raise _unwritable(cache_dir, error) from error
    return folder


def _convert_locked(path: Path, folder: Path, report: Report) -> None:
    for leftover in folder.parent.glob(f"{folder.name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if folder.exists():  # damaged after it was made
        shutil.rmtree(folder)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        partial.chmod(0o755)
        _write_model(path, partial, report)
        _flush_to_disk(partial)
        partial.rename(folder)
        _flush(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_model(path: Path, folder: Path, report: Report) -> None:
    report("reading the GGUF file", 0.0)
    reader = _open(path)
    _check_space(reader, path, folder)
    # Imported late: a model that is converted already must not wait for it.
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    config, tokenizer = _read_metadata(path, report)
    with _explained(path):
        model = _empty_model(config)
    weights = _unpack(path, reader, model, report)
    report("writing the converted model", UNPACKED_UNTIL)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "float32"
    model.config.save_pretrained(folder)
    GenerationConfig.from_model_config(model.config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    report("writing the converted model", 1.0)


def _open(path: Path) -> GGUFReader:
    from gguf import GGUFReader

    with path.open("rb") as file:
        if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise ModelUnavailable(f"{path} is not a GGUF file. Check MODEL, or fetch the file again.")
    try:
        return GGUFReader(path)
    except Exception as error:  # the reader checks little, so a cut-off file fails anywhere in it
        raise ModelUnavailable(f"{path} is damaged: {error}. Fetch the file again.") from error


def _read_metadata(path: Path, report: Report) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoTokenizer

    report("reading the configuration", 0.1)
    with _explained(path):
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    report("reading the tokenizer", 0.3)
    with _explained(path):
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    return config, tokenizer


def _empty_model(config: Any) -> PreTrainedModel:
    """The model's modules without memory for weights: their names and shapes are all that is needed."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def _unpack(
    path: Path, reader: GGUFReader, model: PreTrainedModel, report: Report
) -> dict[str, torch.Tensor]:
    """The weights in float32 under transformers' names, tied ones once."""
    report("unpacking the weights", READ_UNTIL)
    weights: dict[str, torch.Tensor] = {}
    with _explained(path):
        unpack_tensor = _unpacker(reader, model, weights)
    total = sum(int(tensor.n_elements) for tensor in reader.tensors)
    done = 0
    for tensor in reader.tensors:
        with _explained(path):
            unpack_tensor(tensor)
        done += int(tensor.n_elements)
        share = done / total
        report("unpacking the weights", READ_UNTIL + (UNPACKED_UNTIL - READ_UNTIL) * share)
    with _explained(path):
        _check_weights(weights, model)
    return weights


def _unpacker(
    reader: GGUFReader, model: PreTrainedModel, weights: dict[str, torch.Tensor]
) -> Callable[[Any], None]:
    """A function that unpacks one tensor of `reader` into `weights`.

    The mapping from GGUF names, and the architectures' peculiarities, are transformers'. Its own loop over the tensors
    tells nothing of its progress, so it is not used.
    """
    import torch
    from gguf import dequantize
    from transformers import modeling_gguf_pytorch_utils as gguf_support

    architecture = gguf_support.read_field(reader, "general.architecture")[0]
    processor_class = gguf_support.TENSOR_PROCESSORS.get(architecture, gguf_support.TensorProcessor)
    processor = processor_class(config=model.config.to_dict())
    names = gguf_support.get_gguf_hf_weights_map(model, processor)

    def unpack_tensor(tensor: Any) -> None:
        result = processor.process(
            weights=dequantize(tensor.data, tensor.tensor_type),
            name=tensor.name,
            tensor_key_mapping=names,
            # Processors of experts store some tensors there themselves and return no name.
            parsed_parameters={"tensors": weights},
        )
        if result.name in names:
            array = torch.from_numpy(result.weights.copy())
            weights[names[result.name]] = array.to(torch.float32).contiguous()

    return unpack_tensor


def _check_weights(weights: dict[str, torch.Tensor], model: PreTrainedModel) -> None:
    tied = set(model.all_tied_weights_keys)
    for name, expected in model.state_dict().items():
        if name not in weights and name not in tied:
            raise ValueError(f"the weight {name} is missing")
        if name in weights and weights[name].shape != expected.shape:
            raise ValueError(
                f"the weight {name} has the shape {tuple(weights[name].shape)}"
                f" instead of {tuple(expected.shape)}"
            )
    for name in tied:
        weights.pop(name, None)


def _check_space(reader: GGUFReader, path: Path, folder: Path) -> None:
    elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
    needed = elements * FLOAT32_BYTES + SPACE_BESIDE_WEIGHTS
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelUnavailable(
            f"Converting {path.name} needs {needed:,} bytes in {folder.parent}, and {free:,} are free."
            " Make room there or set MODEL_CACHE to another disk."
        )


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns whatever transformers raises over a file's contents, which has no common base, into one error."""
    try:
        yield
    except Exception as error:
        raise ModelUnavailable(f"transformers cannot convert {path}: {error}") from error


def _is_complete(folder: Path) -> bool:
    try:
        check_folder(folder)
    except ModelUnavailable:
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    # The lock file stays: removing it would let two processes lock two files of the same name.
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report("waiting for another process that converts the same model", 0.0)
                time.sleep(0.2)
        yield


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(HASH_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()


def _flush_to_disk(folder: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes for its user alone
        _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(cache_dir: Path, error: OSError) -> ModelUnavailable:
    if error.errno == errno.ENOSPC:
        return ModelUnavailable(
            f"The disk of {cache_dir} is full. Make room there or set MODEL_CACHE to another disk."
        )
    return ModelUnavailable(
        f"The converted model cannot be kept in {cache_dir}: {error}. Set MODEL_CACHE to a folder that can be written."
    )
