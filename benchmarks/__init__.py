"""Measurements: of servers over HTTP (with a load generator, comparisons and plots), and small ones (`micro`)."""

import kernels  # noqa: F401  # limits how long threads spin: must come before torch
