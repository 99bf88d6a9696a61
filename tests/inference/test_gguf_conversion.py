"""Conversion of GGUF files: right weights, never half a folder, one converter at a time."""

from __future__ import annotations

import collections
import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from inference import Engine, EngineConfig, EngineStatus, ModelUnavailable
from inference.gguf_conversion import convert
from inference.sources import check_folder
from tests.inference.conftest import ROOT, TEMPLATE, tiny_tokenizer
from tests.inference.helpers import collect, prompt_of, request

WIDTH, INNER, LAYERS, HEADS, KV_HEADS = 32, 64, 2, 4, 2


def silent(step: str, progress: float) -> None:
    """Reports to nobody."""


def write_gguf(path: Path, *, seed: int = 0) -> None:
    tokenizer = tiny_tokenizer()
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    tokens.append("ab")  # the one merge that there has to be
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(seed)

    def add(name: str, *shape: int, quantized: bool = False) -> None:
        array = random.normal(0, 0.3, shape).astype(np.float32)
        if quantized:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)

    kv_width = WIDTH // HEADS * KV_HEADS
    add("token_embd.weight", len(tokens), WIDTH, quantized=True)
    add("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        add(f"{block}.attn_norm.weight", WIDTH)
        add(f"{block}.ffn_norm.weight", WIDTH)
        add(f"{block}.attn_q.weight", WIDTH, WIDTH, quantized=True)
        add(f"{block}.attn_k.weight", kv_width, WIDTH, quantized=True)
        add(f"{block}.attn_v.weight", kv_width, WIDTH)
        add(f"{block}.attn_output.weight", WIDTH, WIDTH)
        add(f"{block}.ffn_gate.weight", INNER, WIDTH)
        add(f"{block}.ffn_up.weight", INNER, WIDTH)
        add(f"{block}.ffn_down.weight", WIDTH, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if ".partial-" in path.name]


def in_process(path: Path, cache: Path, report: str) -> subprocess.Popen[str]:
    """Convert in a process of its own, with the body of its report function given."""
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from inference.gguf_conversion import convert\n"
        f"def report(step, progress):\n    {report}\n"
        "print(convert(Path(sys.argv[1]), Path(sys.argv[2]), report))\n"
    )
    command = [sys.executable, "-c", code, str(path), str(cache)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_weights_and_tokenizer_are_those_that_transformers_reads(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = convert(tiny_gguf, tmp_path, silent)
    found = safetensors.torch.load_file(folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = load_gguf_checkpoint(tiny_gguf, return_tensors=True, model_to_load=model)["tensors"]
    assert found.keys() == expected.keys() == set(model.state_dict()) - {"lm_head.weight"}
    for name, weight in found.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, expected[name]), name
    source = {"pretrained_model_name_or_path": tiny_gguf.parent, "gguf_file": tiny_gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.encode("Hi 😀<|end|>") == AutoTokenizer.from_pretrained(**source).encode("Hi 😀<|end|>")


def test_an_engine_runs_a_gguf_file_and_tells_its_progress(tiny_gguf: Path, tmp_path: Path) -> None:
    seen: list[EngineStatus] = []
    config = EngineConfig(model=str(tiny_gguf), cache_dir=tmp_path, device="cpu")
    engine = Engine(config, on_status=seen.append)
    engine.start()
    assert engine.wait_until_ready(120)
    assert collect(engine.submit(request(prompt_of(engine, "Hi"), max_tokens=4))).end.usage.completion_tokens
    engine.shutdown()
    converting = [status for status in seen if status.state == "converting"]
    assert len({status.progress for status in converting}) > 10
    assert [s.progress for s in converting] == sorted(s.progress for s in converting)
    assert converting[-1].progress == 1.0
    assert len({status.detail for status in converting}) > 3


def test_the_second_time_nothing_is_done(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = convert(tiny_gguf, tmp_path, silent)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    steps: list[str] = []
    assert convert(tiny_gguf, tmp_path, lambda step, progress: steps.append(step)) == folder
    assert steps == []
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_another_file_gets_another_folder(tiny_gguf: Path, tmp_path: Path) -> None:
    other = tmp_path / "tiny.gguf"
    write_gguf(other, seed=1)
    assert convert(other, tmp_path / "cache", silent) != convert(tiny_gguf, tmp_path / "cache", silent)


def test_a_damaged_conversion_is_made_again(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = convert(tiny_gguf, tmp_path, silent)
    os.truncate(folder / "model.safetensors", 100)
    assert convert(tiny_gguf, tmp_path, silent) == folder
    check_folder(folder)


def test_a_killed_conversion_leaves_nothing_that_counts(tiny_gguf: Path, tmp_path: Path) -> None:
    kill = "progress > 0.7 and os.kill(os.getpid(), signal.SIGKILL)"
    process = in_process(tiny_gguf, tmp_path, kill)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert len(leftovers(tmp_path)) == 1
    folder = convert(tiny_gguf, tmp_path, silent)
    check_folder(folder)
    assert leftovers(tmp_path) == []


def test_concurrent_converters_share_one_conversion(tiny_gguf: Path, tmp_path: Path) -> None:
    processes = [in_process(tiny_gguf, tmp_path, "print(step, file=sys.stderr)") for _ in range(3)]
    outputs = [process.communicate(timeout=180) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert len({output for output, _ in outputs}) == 1
    unpacked = collections.Counter("unpacking the weights" in errors for _, errors in outputs)
    assert unpacked[True] == 1
    assert leftovers(tmp_path) == []


def test_whatever_ends_a_conversion_leaves_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    def stop(step: str, progress: float) -> None:
        if progress > 0.6:
            raise Enough

    with pytest.raises(Enough):
        convert(tiny_gguf, tmp_path, stop)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_a_truncated_file(tiny_gguf: Path, tmp_path: Path, share: float) -> None:
    path = tmp_path / "cut.gguf"
    shutil.copy(tiny_gguf, path)
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(ModelUnavailable, match="is damaged"):
        convert(path, tmp_path / "cache", silent)
    assert leftovers(tmp_path / "cache") == []


def test_an_unknown_architecture(tmp_path: Path) -> None:
    path = tmp_path / "unknown.gguf"
    writer = gguf.GGUFWriter(path, "unheard-of")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelUnavailable, match="transformers cannot convert"):
        convert(path, tmp_path / "cache", silent)


def test_too_little_space(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 95, 5))
    with pytest.raises(ModelUnavailable) as caught:
        convert(tiny_gguf, tmp_path, silent)
    assert str(tmp_path) in caught.value.message
    assert "MODEL_CACHE" in caught.value.message
    assert any(word.replace(",", "").isdigit() and len(word) > 8 for word in caught.value.message.split())


def test_a_disk_that_fills_up_meanwhile(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(ModelUnavailable, match="is full"):
        convert(tiny_gguf, tmp_path, silent)
    assert leftovers(tmp_path) == []


def test_a_cache_that_cannot_be_written(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelUnavailable, match="MODEL_CACHE"):
        convert(tiny_gguf, tmp_path / "file", silent)
