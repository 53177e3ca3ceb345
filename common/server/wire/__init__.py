"""Wire formats: one answer's outputs as the bytes of a stream, or as one JSON object. A module each.

| module | routes | stream |
| --- | --- | --- |
| `named` | `/v1/completions` | named events, each of them an OpenAI chunk, too |
| `plain` | `/openai/v1/completions` | OpenAI's own: unnamed chunks, and `[DONE]` |
| `chat` | `/v1/chat/completions`, `/openai/v1/chat/completions` | the same for chat: the role first |
"""
