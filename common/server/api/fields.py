"""Fields of requests: the table of those that are known and not implemented, and the rule for unknown ones.

```text
a field of the body's class        implemented
  in UNIMPLEMENTED                 ignoring it would change the answer: refused, except at neutral values
  in HINTS                         changes no answer: accepted with any value
  anything else                    ignored, and named in the log and in the header x-infer-ignored;
                                   with --strict-fields, refused
```
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, Discriminator

from common.server.errors import ApiError, shorten


class Unimplemented(NamedTuple):
    """A field that is not implemented.

    Attributes:
        reason: why values other than the neutral ones are refused, and what to send instead if there is anything.
        neutral: values that ask for nothing. Null always asks for nothing, and is not among them.
    """

    reason: str
    neutral: tuple[Any, ...] = ()


OLD_TOOLS = "the older form of tools; send tools, tool_choice and tool_calls instead"
_WRITES_TEXT = "answers are text"
_READS_TEXT = "this server reads text only"
_STRUCTURED = "structured_outputs has answers of a form"
_ONE_ANSWER = "completions and chat have it"
_NOTHING_STORED = "send the items themselves as input"
_SAYS_SCHEMA = "the model chooses white space, and a schema says the rest"

#: Fields whose values would change the answer, by the places that have them (`places` of bodies and objects) and by
#: name. The table in `docs/http-api.md` is made from this one.
UNIMPLEMENTED: Mapping[str, Mapping[str, Unimplemented]] = {
    "all bodies": {
        "audio": Unimplemented(_WRITES_TEXT),
        "ebnf": Unimplemented(_STRUCTURED),
        "function_call": Unimplemented(OLD_TOOLS, ("none", "auto")),
        "functions": Unimplemented(OLD_TOOLS, ([],)),
        "grammar": Unimplemented(_STRUCTURED, ("",)),
        "guided_choice": Unimplemented(_STRUCTURED),
        "guided_grammar": Unimplemented(_STRUCTURED),
        "guided_json": Unimplemented(_STRUCTURED),
        "guided_regex": Unimplemented(_STRUCTURED),
        "json_schema": Unimplemented(_STRUCTURED, ({},)),
        "logits_processors": Unimplemented("clients cannot send code", ([],)),
        "modalities": Unimplemented(_WRITES_TEXT, (["text"],)),
        "regex": Unimplemented(_STRUCTURED),
        "repetition_detection": Unimplemented("frequency_penalty works against repetition"),
        "return_token_offsets": Unimplemented("logprobs has text_offset", (False,)),
        "return_tokens_as_token_ids": Unimplemented("return_token_ids has the ids", (False,)),
        "structural_tag": Unimplemented(_STRUCTURED),
        "thinking_token_budget": Unimplemented("the model decides how long it thinks", (-1,)),
        "use_beam_search": Unimplemented("tokens are sampled; temperature 0 is greedy", (False,)),
        "web_search_options": Unimplemented("the web is not searched"),
    },
    "completions": {
        "prompt_embeds": Unimplemented("prompts are text or token ids"),
        "suffix": Unimplemented("text is not inserted, only continued", ("",)),
    },
    "conversations": {
        "chat_template": Unimplemented("the template comes with the model"),
        "documents": Unimplemented("put documents into a message", ([],)),
        "include_reasoning": Unimplemented("thoughts have their own field", (True,)),
    },
    "responses, Anthropic's messages": {
        "echo": Unimplemented(_ONE_ANSWER, (False,)),
        "n": Unimplemented("there is one answer; completions and chat have n", (1,)),
        "prompt_logprobs": Unimplemented(_ONE_ANSWER),
        "return_token_ids": Unimplemented(_ONE_ANSWER, (False,)),
    },
    "responses": {
        "background": Unimplemented("a response is not computed later: stream it", (False,)),
        "conversation": Unimplemented(_NOTHING_STORED),
        "image": Unimplemented(_READS_TEXT, ({},)),
        "previous_input_messages": Unimplemented(_NOTHING_STORED),
        "prompt": Unimplemented(_NOTHING_STORED),
    },
    "messages": {
        "audio": Unimplemented(_READS_TEXT),
        "function_call": Unimplemented(OLD_TOOLS),
    },
    "structured_outputs": {
        "disable_additional_properties": Unimplemented(_SAYS_SCHEMA, (False,)),
        "disable_any_whitespace": Unimplemented(_SAYS_SCHEMA, (False,)),
        "json_object": Unimplemented('response_format with type "json_object" does this', (False,)),
        "structural_tag": Unimplemented("send json, regex, choice or grammar"),
        "whitespace_pattern": Unimplemented(_SAYS_SCHEMA),
    },
}

#: Names of fields of OpenAI's and vLLM's requests that change no answer of this server, by place.
HINTS: Mapping[str, frozenset[str]] = {
    place: frozenset(names.split())
    for place, names in {
        "everywhere": "annotations cache_control prompt_cache_breakpoint refusal",
        "all bodies": "access_programs background_options client_metadata context_management ec_transfer_params "
        "enable_response_messages guided_decoding_backend guided_whitespace_pattern kv_transfer_params "
        "length_penalty media_io_kwargs max_tool_calls mm_processor_kwargs moderation prompt_cache_options "
        "prompt_cache_retention request_id service_tier spaces_between_special_tokens vllm_xargs",
        "conversations": "best_of return_assistant_tokens_mask return_prompt_text",
        "Anthropic's messages": "container diagnostics inference_geo speed user_profile_id workspace_id",
        "reasoning": "context generate_summary mode summary",
        "items": "caller encrypted_content",
        "tools of responses": "allowed_callers async defer_loading output_schema",
        "stream_options": "include_obfuscation",
        "structured_outputs": "disable_fallback",
    }.items()
}

#: Most names of ignored fields in one answer's header, and most characters of a name.
MOST_NAMES = 16
MOST_CHARACTERS = 60

_PLAIN = frozenset({type(None), bool, int, float, str, dict})  # types of values that have no fields


def review(body: BaseModel, ignored: dict[str, str], *, strict: bool = False, prefix: str = "") -> None:
    """Check the fields of a validated body, and of the objects in it, that are not implemented.

    Args:
        body: the body, or an object in it.
        ignored: the path of each unknown field's first place in the body (`messages[0].color`), by the path without
            numbers (`messages[].color`). At most `MOST_NAMES` fields are added.
        strict: unknown fields are refused instead.
        prefix: the path of `body` in the whole body, with a dot at its end; empty for the whole body.

    Raises:
        ApiError: 422, a field of `UNIMPLEMENTED` has another than a neutral value, or, if `strict`, a field is
            unknown.
    """
    known, hints = _lines_for(type(body))
    extra = body.model_extra or {}
    for name in known.keys() & body.model_fields_set if known else ():
        value = extra[name] if name in extra else getattr(body, name)
        _require_neutral(f"{prefix}{name}", value, known[name])
    for name in extra:
        if len(ignored) == MOST_NAMES:
            break
        if name in known or name in hints:
            continue
        if strict:
            path = prefix + shorten(name, 100)
            raise ApiError(422, f"{path}: unknown field", param=path, code="unknown_field")
        note(ignored, prefix, name)
    for name, value in body.__dict__.items():  # the fields of the body's class
        if type(value) in _PLAIN:  # much faster than pydantic's `isinstance`
            continue
        if isinstance(value, BaseModel):
            review(value, ignored, strict=strict, prefix=f"{prefix}{name}.")
        elif isinstance(value, list):
            for number, item in enumerate(value):
                if not isinstance(item, BaseModel):  # a list of plain values: however long, it has no fields
                    break
                review(item, ignored, strict=strict, prefix=f"{prefix}{name}[{number}].")


def note(ignored: dict[str, str], prefix: str, name: str) -> None:
    """Add an ignored field to `ignored`: see `review`."""
    # Names that a client made up are written into a header and into the log.
    path = prefix + re.sub(r"[^\w.$-]", "?", shorten(name, MOST_CHARACTERS), flags=re.ASCII)
    ignored.setdefault(re.sub(r"\[\d+\]", "[]", path), path)


@functools.cache
def _lines_for(form: type[BaseModel]) -> tuple[Mapping[str, Unimplemented], frozenset[str]]:
    """Return the lines of `UNIMPLEMENTED` and the names of `HINTS` for the places that a class has."""
    places: tuple[str, ...] = getattr(form, "places", ())
    known = {name: line for place in places for name, line in UNIMPLEMENTED.get(place, {}).items()}
    return known, frozenset().union(*(HINTS.get(place, ()) for place in ("everywhere", *places)))


def _require_neutral(path: str, value: Any, known: Unimplemented) -> None:
    """Raise ApiError (422) if `value` is neither null nor a neutral value of the field at `path`."""
    if value is None or any(_same_json(value, each) for each in known.neutral):
        return
    neutral = ", ".join(json.dumps(each) for each in known.neutral)
    instead = f"send {neutral} or null, or leave it out" if neutral else "send null, or leave it out"
    shown = f"{shorten(json.dumps(value), 40)} is refused: " if isinstance(value, str | int | float) else ""
    raise ApiError(422, f"{path}: {shown}{known.reason}; {instead}", param=path, code="invalid_value")


def _same_json(value: Any, neutral: Any) -> bool:
    """True if both are the same JSON value. In Python 0 equals False and 1 equals True; in JSON they differ."""
    return bool(value == neutral) and isinstance(value, bool) is isinstance(neutral, bool)


# ---------------------------------------------------------------------- values of several types


def by_type(expected: str) -> Discriminator:
    """Return a discriminator that tags a value with the name of its Python type, such as `str` or `list`.

    Without it, pydantic would try all types of a union, and report the mistakes in a long list once for each.
    `expected` names the types that are accepted, for the error's message.
    """
    return Discriminator(
        lambda value: type(value).__name__,
        custom_error_type="union_type",
        custom_error_message=f"Input should be {expected}",
    )
