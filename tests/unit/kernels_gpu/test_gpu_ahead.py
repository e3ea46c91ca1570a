"""Kernels compile ahead of time to machine code for every architecture, within its shared memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def compile_ahead(*arguments: str, timeout: float) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "baton_kernels.gpu.ahead", *arguments],
        env=environment, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_one_configuration_of_each_kernel() -> None:
    out = compile_ahead("90", "--one-of-each", timeout=110)
    kernels = {line.split()[1] for line in out.splitlines()[:-1]}
    assert {"rms_norm", "silu_mul", "gather_rows", "rope_write", "attention", "merge_splits"} <= kernels
    assert {"linear", "move_blocks", "reshape_pages", "edit", "sample"} <= kernels


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_every_configuration(arch: str) -> None:
    assert compile_ahead(arch, timeout=800).rstrip().endswith("0 failed")


def test_nothing_is_compiled_while_interpreting() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "baton_kernels.gpu.ahead", "90"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr
