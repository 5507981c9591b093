"""Plait: a compiler stack for pipeline-parallel training of PyTorch and JAX models."""

__version__ = "0.1.0"
