"""Kernels. Each module has a kernel, its torch reference, and the function that chooses between them."""

from kernels.openmp import limit_spinning

limit_spinning()
