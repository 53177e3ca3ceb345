"""Workers: programs that run in a peer's virtual environment. Of this project, they use only this folder.

There are two exceptions: `ours` and `transformers` run in this project's environment, and `ours` uses the engine.
`benchmarks micro decode_step` treats all workers alike.
"""
