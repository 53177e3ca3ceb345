"""What the phases share: models, requests, sampling, text, KV memory, the engine step, and the server."""
