"""Where passes run while the host goes on: streams of work, and CUDA graphs of it.

Begin with `streams`: a `Stream` runs submitted work in order and returns `Pending` work to wait for. It is a
thread on a CPU, and CUDA's streams on a GPU. Phases 9 and 10 use it; the earlier phases compute where they are
called.
"""
