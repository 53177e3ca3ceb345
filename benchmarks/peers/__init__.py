"""Other ways to serve the same model, to be put in the same table.

Each peer is a small file of its own. Those that bring libraries of their own live in virtual environments of their
own; what runs there is in `workers`, which is why this file imports nothing.

```text
our environment                                        the peer's environment

registry ──> library, a server ──> front ── process ──pipe──> workers.openvino, workers.llama_cpp
        └──> vllm_server, which becomes ─────────────────────> vLLM's server
decode_step ─────────────────────────────── process ──pipe──> workers.*
```
"""
