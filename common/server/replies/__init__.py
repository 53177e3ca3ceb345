"""Answers to requests for text, and their wire formats, which write an answer as a stream or as one JSON object.

| format | routes | its stream |
| --- | --- | --- |
| `NamedCompletionEvents` | `/v1/completions` | named events. Except in `error`, their `data` is an OpenAI chunk |
| `CompletionChunks` | `/openai/v1/completions` | OpenAI's own: unnamed chunks, and `[DONE]` |
| `ChatChunks` | `/v1/chat/completions`, `/openai/v1/chat/completions` | OpenAI's chunks of chat, then `[DONE]` |
| `ResponseEvents` | `/v1/responses`, `/openai/v1/responses` | OpenAI's named events of a list of items |
"""
