"""Measuring servers over HTTP: workloads, a load generator, comparisons, peers and plots."""

import kernels  # noqa: F401  # limits how long threads spin: must come before torch
