"""Code that all phases share, in wings. A wing imports only those below it (a contract in `pyproject.toml`).

```text
server         HTTP: bytes become a request, and outputs become an answer
hosting        an engine in a process of its own: that process, the messages, and the engine as asyncio sees it
startup        options become an engine: its phase is found, its model loaded, its memory checked
observing      traces of requests and steps, and the frames that the viewer draws
engine         the step: scheduler, runner and commit, which the phases fill in
models         architectures and their layers; checkpoints, GGUF files, presets
sampling       logits become tokens
devices        streams, which run passes while the host goes on; CUDA graphs
constrained    grammars and tool calls: which tokens an answer may have
text           messages become a prompt, a prompt becomes tokens, and tokens become text
```

Beside the wings: `request` (a request and its states), `kv` (KV memory), `llm` (all of it without a server),
`errors`, `json_file` and `version`. The glossary, `docs/glossary.md`, explains seat, slot, column, step and pass.
"""

import kernels  # noqa: F401  # limits how long threads spin: must come before torch
