"""Answers to requests for text: their objects, and their wire formats.

| format | routes | stream |
| --- | --- | --- |
| `NamedCompletionEvents` | `/v1/completions` | named events whose `data` are OpenAI chunks, too |
| `CompletionChunks` | `/openai/v1/completions` | OpenAI's own: unnamed chunks, and `[DONE]` |
| `ChatChunks` | `/v1/chat/completions`, `/openai/v1/chat/completions` | OpenAI's chunks of chat, then `[DONE]` |
| `ResponseEvents` | `/v1/responses`, `/openai/v1/responses` | OpenAI's named events of a list of items |
"""
