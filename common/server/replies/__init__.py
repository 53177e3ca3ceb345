"""Answers to requests for text: their objects, and their wire formats.

| format | routes | stream |
| --- | --- | --- |
| `NamedCompletionEvents` | `/v1/completions` | named events, each of them an OpenAI chunk, too |
| `CompletionChunks` | `/openai/v1/completions` | OpenAI's own: unnamed chunks, and `[DONE]` |
| `ChatChunks` | `/v1/chat/completions`, `/openai/v1/chat/completions` | the same for chat: the role first |
| `ResponseEvents` | `/v1/responses`, `/openai/v1/responses` | OpenAI's named events of a list of items |
"""
