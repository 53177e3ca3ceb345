"""`python -m kernels.native` builds the native kernels ahead of the first server, as `make` does."""

import logging

from kernels.native import load_native_kernels

logging.basicConfig(level=logging.INFO, format="%(message)s")
load_native_kernels()
