"""benchmarks/gpu.py: what it would run, what it says without a GPU, and that all of it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.py"


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**clean, **environment}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip


def test_dry_run_lists_every_section() -> None:
    done = script("--dry-run")
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == ["decode-attention", "chunk-attention", "linear", "moves", "decode-step", "handoff"]


def test_without_a_gpu_it_says_so() -> None:
    done = script(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "finds no NVIDIA GPU" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(520)
def test_all_of_it_runs_interpreted() -> None:
    done = script("--small", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pull of 2 blocks over CUDA IPC" in done.stdout
    assert done.stdout.count("\n| ") >= 24
