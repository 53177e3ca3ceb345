"""The architectures (listed in `registry`), the layers that they share, and how checkpoints are found and read."""
