"""Compiling every configuration ahead of time, on a machine with or without a GPU.

    python -m baton_kernels.gpu.ahead [ARCH ...] [--one-of-each]

Needs Triton not to interpret: `TRITON_INTERPRET` unset. One line a kernel; exit 1 if one does not compile or
asks for more shared memory than the chip has.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass

from baton_kernels.gpu.launch import Variant

# Bytes of shared memory that one program may have (CUDA C++ Programming Guide, technical specifications).
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclass(slots=True, frozen=True)
class Compiled:
    """What the compiler says of a kernel for one architecture."""

    variant: Variant
    arch: int
    shared: int  # bytes
    cubin: int  # bytes


class CompileError(RuntimeError):
    """A kernel that does not compile, or does not fit."""


def compile_for(variant: Variant, arch: int) -> Compiled:
    """Down to machine code for sm_`arch`.

    Raises:
        CompileError: with the kernel's name and the compiler's words.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = variant.kernel
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if variant.signature[name].startswith("*")
    }
    source = ASTSource(kernel, variant.signature, variant.constants, aligned)
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": False}
    try:
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:
        raise CompileError(f"{kernel.__name__} for sm_{arch}: {error}\n{variant.key}") from error
    shared = made.metadata.shared
    if shared > SHARED[arch]:
        raise CompileError(f"{kernel.__name__} for sm_{arch}: {shared} bytes of shared memory\n{variant.key}")
    return Compiled(variant, arch, shared, len(made.asm["cubin"]))


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Compile the GPU kernels ahead of time.")
    parser.add_argument("arch", nargs="*", type=int, default=list(SHARED), help="such as 90; default: all")
    parser.add_argument("--one-of-each", action="store_true", help="one configuration of each kernel")
    given = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: nothing would be compiled")
    from baton_kernels.gpu.catalogue import variants

    found = variants()
    if given.one_of_each:
        found = list({variant.kernel.__name__: variant for variant in reversed(found)}.values())
    failed = 0
    for arch in given.arch:
        for variant in found:
            try:
                made = compile_for(variant, arch)
            except CompileError as error:
                failed += 1
                print(f"FAILED {error}", flush=True)
                continue
            name = variant.kernel.__name__.lstrip("_")
            print(f"sm_{arch} {name:14} {made.shared:7} B shared {made.cubin:8} B code", flush=True)
    print(f"{len(found)} configurations, {len(given.arch)} architectures, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
