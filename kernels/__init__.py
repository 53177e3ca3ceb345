"""Kernels, their torch references, and the functions that choose between them."""

from kernels.openmp import limit_spinning

limit_spinning()
