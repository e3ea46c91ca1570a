"""What the GPU engine says where it cannot run; and the tuning's file."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config.settings import ModelSettings, Settings, WorkerSettings
from baton.runner import triton_device
from baton.runner.create import create
from baton.runner.triton_device import (
    GpuUnusable,
    ensure_memory,
    gpu_visible,
    open_device,
    told_when_full,
    try_out,
)
from baton.runner.triton_tuning import Tuning
from baton_kernels.gpu import gather
from baton_kernels.gpu.quantise import Weight, quantise
from baton_kernels.gpu.tiles import Tiles, candidates


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_device, "interpreting", lambda: False)


def test_no_gpu(no_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for built, fix in ((None, "install a CUDA build of torch"), ("13.0", "nvidia-smi")):
        monkeypatch.setattr(torch.version, "cuda", built)
        with pytest.raises(GpuUnusable, match=f"finds no NVIDIA GPU: .*{fix}.* --engine native"):
            open_device()


def test_an_old_gpu(no_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(
        GpuUnusable, match=r"Tesla T4 has compute capability 7.5; .* needs 8.0 .*take another GPU"
    ):
        open_device()


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(GpuUnusable, match=r"pip install 'baton-serve\[gpu\]'"):
        open_device()


def test_a_triton_that_fails_or_computes_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("ptxas\nwas not found")

    monkeypatch.setattr(gather, "gather_rows", fail)
    with pytest.raises(GpuUnusable, match=r"cannot run a kernel here \(ptxas was not found\): reinstall"):
        try_out(torch.device("cpu"))
    monkeypatch.setattr(gather, "gather_rows", lambda *_: None)
    with pytest.raises(GpuUnusable, match="computes wrongly"):
        try_out(torch.device("cpu"))


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 << 30, 8 << 30))
    with pytest.raises(GpuUnusable, match=r"4096 MB .* 3072 MB are free: lower --worker-kv-memory-mb 512"):
        ensure_memory(torch.device("cuda", 0), 4 << 30, 512)
    ensure_memory(torch.device("cuda", 0), 2 << 30, 512)
    with (
        pytest.raises(GpuUnusable, match=r"^CUDA out of memory: lower --worker-kv-memory-mb 512"),
        told_when_full(512),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


def test_a_gpu_is_looked_for_without_loading_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_device, "glob", lambda pattern: [pattern])
    assert gpu_visible()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not gpu_visible()


def test_auto_goes_on_without_a_gpu_that_cannot_be_used(
    no_interpreter: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    import tiny_llama

    folder = tiny_llama.save(tmp_path / "model")
    monkeypatch.setattr(triton_device, "gpu_visible", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = ModelSettings(name=str(folder), cache_dir=str(tmp_path), dtype="float32")
    with caplog.at_level(logging.WARNING):
        made = create(Settings(model=model, worker=WorkerSettings(threads=1)))
    assert type(made.inner).__name__ == "TorchRunner"
    assert len([line for line in caplog.messages if "the GPU is not used: " in line]) == 1
    with pytest.raises(GpuUnusable):
        create(Settings(model=model, worker=WorkerSettings(engine="triton")))


def measured(asked: list[Tiles]) -> Any:
    """A measurement by which the second candidate is the fastest."""

    def measure(weight: Weight, compute: torch.dtype, tiles: Tiles) -> float:
        asked.append(tiles)
        return abs(candidates(compute, weight.format).index(tiles) - 1) + 1.0

    return measure


def test_tuning_is_done_once_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[Tiles] = []
    device = torch.device("cpu")
    weight = quantise(torch.randn(64, 32), "int8")
    beside = Tuning(device, tmp_path, measured(asked))  # has read that there is nothing yet
    options = candidates(torch.bfloat16, "int8")
    first = Tuning(device, tmp_path, measured(asked))
    with caplog.at_level(logging.INFO):
        assert first.choose(weight, torch.bfloat16) == options[1]
    assert any("once; kept in" in line for line in caplog.messages)
    assert asked == list(options)
    again = Tuning(device, tmp_path, measured(asked))
    assert again.choose(weight, torch.bfloat16) == options[1]
    assert len(asked) == len(options)
    assert again.name == first.name
    assert beside.choose(weight, torch.bfloat16) == options[1]
    assert len(asked) == len(options), "workers that start together choose once"
    plain = Tuning(device, tmp_path / "other")
    assert plain.choose(weight, torch.bfloat16) == options[0]
    assert plain.name != first.name


def test_a_damaged_tuning_file_is_made_anew(tmp_path: Path) -> None:
    asked: list[Tiles] = []
    device = torch.device("cpu")
    weight = quantise(torch.randn(64, 32), "int8")
    Tuning(device, tmp_path, measured(asked)).choose(weight, torch.bfloat16)
    (file,) = (tmp_path / "tuning").glob("*.json")
    file.write_text('{"64x32')
    Tuning(device, tmp_path, measured(asked)).choose(weight, torch.bfloat16)
    assert len(asked) == 2 * len(candidates(torch.bfloat16, "int8"))
    assert Tuning(device, tmp_path, measured([])).choose(weight, torch.bfloat16) != Tiles()


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tuning").write_text("a file in the folder's place")
    tuning = Tuning(torch.device("cpu"), tmp_path, measured([]))
    tuning.choose(quantise(torch.randn(64, 32), "plain"), torch.bfloat16)
    assert any("is not kept" in line for line in caplog.messages)
