"""The architectures on the flat forward pass, and how their checkpoints are found and read."""
