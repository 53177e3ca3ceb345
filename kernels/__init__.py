"""Kernels: each beside its torch reference and the one function that picks between them."""
