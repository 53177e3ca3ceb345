"""Peers: other programs that serve or compute the same model, measured beside the phases.

vLLM, OpenVINO and llama.cpp have virtual environments of their own. Code that runs in such an environment is in
`workers`. This file imports nothing, because these environments lack the project's requirements.

```text
compare      ── registry ──> generate, our own loop behind HTTP
                        ├──> vLLM's own server
                        └──> llama.cpp's own server
decode_step  ── process ──pipe──> workers.ours, .transformers, .vllm, .openvino, .llama_cpp
```
"""
