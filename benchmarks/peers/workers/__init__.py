"""Programs that run in an environment of the peer's own, and import nothing else of ours than what is here.

`ours` and `transformers` run in our own environment: for `benchmarks micro decode_step`, which treats all alike.
"""
