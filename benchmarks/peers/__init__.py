"""Peers: other servers of the same model, measured beside the phases.

`registry` knows how to start `generate` (our own loop behind HTTP), vLLM's server and llama.cpp's server.
"""
