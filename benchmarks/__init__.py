"""Measuring servers over HTTP: workloads, a load generator, comparisons, peers and plots."""
