"""Programs that run in a peer's environment, and import nothing of this project outside this folder.

`ours` and `transformers` run in this project's environment, and `ours` imports the engine. `benchmarks micro
decode_step` treats all workers alike.
"""
