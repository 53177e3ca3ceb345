"""The architectures on the flat forward pass, listed in `registry`, and how checkpoints are found and read."""
