"""Kernels: each beside its torch reference and the one function that picks between them."""

from kernels.openmp import limit_spinning

limit_spinning()
