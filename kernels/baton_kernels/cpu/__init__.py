"""The CPU kernels: C++ behind a plain C ABI, compiled by any C++20 compiler, called by ctypes. No torch.

build.py     compiles, keeps the result
library.py   loads it; the structs that cross the border
packing.py   weights into panels, in numpy
executor.h   a step: every thread walks one list of operations
sampling.h   the tokens that follow from its logits
"""

# Part of the fingerprint of KV blocks: raise it whenever an operation's bits change.
CONTRACT = 1
