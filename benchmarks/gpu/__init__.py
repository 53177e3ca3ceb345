"""Runs everything that waits for a GPU: `make gpu OUT=DIR [STAGE=n]`, `python -m benchmarks.gpu`."""
