"""Runs all tests and measurements that need a GPU: `make gpu OUT=DIR [STAGE=n]`, `python -m benchmarks.gpu`."""
