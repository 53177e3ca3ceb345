"""Text to tokens and back: a chat template turns messages into a prompt, a tokenizer turns a prompt into ids.

Begin with `tokenizer`: `Tokenizer` encodes prompts, and `IncrementalDetokenizer` turns an answer's tokens into
text as they come, and finds stop strings. `dialect` knows how a model marks its thoughts and its tool calls.
"""
