"""Kernels: one file an operation, with its plain torch reference beside it."""
