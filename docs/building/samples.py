"""Output of the bundled models and of the server, generated when the site is built."""

from __future__ import annotations

import functools

from common.llm import LLM, SamplingParams
from common.server.replies.answer import Answer, Choice, Prompt
from common.server.replies.formats import NamedCompletionEvents
from common.server.requests.generation import StreamOptions

PROMPT = "Once upon a time"


@functools.cache
def _llm(model: str) -> LLM:
    return LLM(model, phase="continuous", dtype="float32")


def zoo_samples() -> str:
    """Return the beginning of a story by each bundled model."""
    parts = []
    for name in ("llama", "qwen3", "gemma3"):
        params = SamplingParams(temperature=0.0, max_new_tokens=70)
        [completion] = _llm(f"zoo:{name}-tiny").generate([PROMPT], params, progress=False)
        text = " ".join(completion.text.split())
        parts.append(f"`zoo:{name}-tiny`\n:   **{PROMPT}** {text} …\n")
    return "\n".join(parts)


def event_stream(max_tokens: int = 3) -> str:
    """Return the event stream of a short completion, as the server writes it."""
    engine = _llm("zoo:llama-tiny").engine
    request = engine.create_request(PROMPT, SamplingParams(temperature=0.0, max_new_tokens=max_tokens))
    choice = Choice(0, Prompt(), is_prompts_first=True)
    answer = Answer("cmpl-5f0c", 1767225600, "zoo:llama-tiny", engine.tokenizer, [choice])
    wire = NamedCompletionEvents(answer, StreamOptions())
    assert engine.add_request(request)
    stream = b""
    while engine.has_work:
        for output in engine.step():
            choice.add(output)
            stream += wire.events(choice, output)
    return f"```{{ .text .wrap }}\n{stream.decode().strip()}\n```\n"
