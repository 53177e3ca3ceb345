"""Other programs that serve or compute the same model, to be put in the same table.

vLLM, OpenVINO and llama.cpp live in virtual environments of their own. Code that runs in such an environment is in
`workers`, which is why this file imports nothing.

```text
compare      ── registry ──> generate, our own loop behind HTTP
                        └──> vLLM's own server
decode_step  ── process ──pipe──> workers.ours, .transformers, .vllm, .openvino, .llama_cpp
```
"""
