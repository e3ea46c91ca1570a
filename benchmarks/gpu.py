"""The GPU engine, measured: `python benchmarks/gpu.py [--dry-run] [--small] [--only NAME]`.

Checks kernels against plain torch, times them against what this GPU was measured to do and against torch's
own, and runs a random model of Llama 3 8B's shape, with prefill and decode in two processes. Under 8 minutes;
prints one table. `--dry-run` lists what would run, and needs no GPU. `--small` runs all at tiny sizes, under
TRITON_INTERPRET=1 too: it shows that the script works, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

BUDGET_S = 8 * 60

SECTIONS = {
    "decode-attention": "32 sequences of 8,192 tokens, a query each: at least 80 % of the copy bandwidth",
    "chunk-attention": "a chunk of 2,048 up to 8,192 tokens: 60 % of the bf16 matrix rate; beside SDPA",
    "linear": "a layer's matrices: 75 % of cuBLAS from 512 rows on; int8, int4 at one row 75 % of bandwidth",
    "moves": "8,192 tokens' blocks gathered with checksums: at least 70 % of the copy bandwidth",
    "decode-step": "a whole step of 1 and of 64 sequences: within 1.35 times its roofline",
    "handoff": "prefill and decode in two processes over CUDA IPC: equal tokens, 70 % of the copy bandwidth",
}


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="list what would run")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    given = parser.parse_args(arguments)
    names = [given.only] if given.only else list(SECTIONS)
    if given.dry_run:
        for name in names:
            print(f"{name:18} {SECTIONS[name]}")
        return 0
    return run(names, small=given.small)


def run(names: list[str], *, small: bool) -> int:
    """Measures, and prints the table; 1 if something asked for is not reached."""
    import torch

    from baton.runner.triton_device import GpuUnusable, open_device

    try:
        device = open_device()
    except GpuUnusable as error:
        print(error, file=sys.stderr)
        return 2
    from gpu_cases import SMALL, Row, Sizes, measure

    sizes = SMALL if small else Sizes()
    started = time.monotonic()
    machine = measure(device, sizes)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU: times mean nothing"
    print(f"{datetime.date.today()}, {name}, torch {torch.__version__}")
    print(f"copy {machine.bytes_per_s / 1e9:.0f} GB/s, bf16 product {machine.flops / 1e12:.0f} TFLOP/s\n")
    print("| what | us | share | of | asked |\n|---|---|---|---|---|")
    missed = 0
    for section in names:
        if time.monotonic() - started > BUDGET_S:
            print(f"| {section} | left out: {BUDGET_S} s are over | | | |")
            missed += 1
            continue
        row: Row
        for row in sections()[section](machine, sizes):
            missed += row.share < row.wanted and not small
            asked = f"{row.wanted:.2f}" if row.wanted else ""
            print(
                f"| {row.name} | {row.microseconds:.1f} | {row.share:.2f} | {row.against} | {asked} |",
                flush=True,
            )
    print(f"\n{time.monotonic() - started:.0f} s, {missed} not reached")
    return 1 if missed else 0


def sections() -> dict[str, Callable[..., Iterator]]:
    """What each name runs."""
    import gpu_cases
    import gpu_engine

    from baton.runner.triton_device import open_device
    from baton.runner.triton_tuning import Tuning

    tuning = Tuning(open_device(), Path(tempfile.gettempdir()) / "baton-bench")
    return {
        "decode-attention": gpu_cases.decode_attention,
        "chunk-attention": gpu_cases.chunk_attention,
        "linear": partial(gpu_cases.products, tuning=tuning),
        "moves": gpu_cases.moves,
        "decode-step": partial(gpu_engine.decode_steps, tuning=tuning),
        "handoff": partial(gpu_engine.handoff, tuning=tuning),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
