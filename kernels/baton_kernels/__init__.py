"""The operations of a decoder, one file each. Importing the package itself does not import torch.

Every operation is batch-invariant: the bits of a row's result depend on that row alone, not on the rows
beside it, their number, the chunking, the physical blocks or the number of threads. What makes it so:

- GEMMs run on row counts that `rows` has found to give each row the same bits (`rows.padded`);
- attention splits the keys at fixed absolute positions and combines the splits in a fixed tree;
- element-wise steps use only operations that IEEE 754 rounds exactly, and `exp`, whose torch kernel treats
  vector tails like vectors (`silu` and `sigmoid` do not: measured, torch 2.13).

`reference` holds each operation again in plain torch and float64, to test against.
"""

# Part of the fingerprint of KV blocks: raise it whenever an operation's bits change.
CONTRACT = 1
