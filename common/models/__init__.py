"""Architectures, and how their checkpoints are found and read.

Begin with `layers` (the flat pass through the layers that all architectures share) and `llama`. The other
architectures are short variants, listed in `registry`, which finds a model by its name. `loader` and `gguf/`
read weights.
"""
