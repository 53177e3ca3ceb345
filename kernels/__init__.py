"""Kernels, their torch references, and the functions that choose between them."""

from kernels.openmp import limit_spinning

limit_spinning()

#: In place of a token id: a row of logits had a NaN, or nothing above minus infinity.
NOT_A_TOKEN = -1
