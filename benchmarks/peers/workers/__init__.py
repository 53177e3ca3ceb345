"""Workers: programs that run in a peer's virtual environment. Of this project, they import only this folder.

The workers `ours` and `transformers` run in this project's environment, and `ours` also imports the engine.
`benchmarks micro decode_step` treats all workers alike.
"""
