"""The same operations as Triton kernels for NVIDIA GPUs, one file each. Importing the package loads nothing.

What makes a row's bits its own here:

- a kernel's tiles, warps and the order of its sums never depend on how many rows there are, nor on whose;
- keys are split at fixed absolute positions, and the splits are merged in one order by one function;
- multiplications and additions are never fused by the compiler's choice (`launch.launch` says so each time);
- whatever is masked adds exactly zero.

`docs/kernels.md` has a picture of a page and a paragraph a kernel.
"""

# Part of the fingerprint of KV blocks: raise it whenever a kernel's bits change.
CONTRACT = 1
