"""Baton: disaggregated serving of large language models."""

__version__ = "0.1.0"
