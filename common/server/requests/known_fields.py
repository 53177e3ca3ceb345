"""Fields that OpenAI's and vLLM's clients send and this server does not implement.

A field is accepted at its neutral values, which ask for nothing. Any other value is refused with a reason. Clients
fill in fields that their users never set, so without these lines a default would be refused as an unknown field.

The request bodies, and objects in them, inherit the classes below. The table in `docs/http-api.md` is made from
these classes, and `tests/server/test_known_fields.py` sends neutral and other values of every field.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

from common.server.bodies import BODY, NOT_IMPLEMENTED
from common.server.errors import shorten


class Neutral:
    """Annotation of a field that is not implemented: rejects all but its neutral values.

    Args:
        values: values that ask for nothing. Null always asks for nothing, and need not be named.
        reason: why other values are refused, and what to send instead if there is anything.
    """

    def __init__(self, *values: Any, reason: str) -> None:
        self.values = (None, *values)
        self.reason = reason

    def check(self, value: Any) -> Any:
        """Return `value` if it is neutral. Raises PydanticCustomError for any other value."""
        if any(_same_json(value, each) for each in self.values):
            return value
        neutral = ", ".join(json.dumps(each) for each in self.values[1:])
        instead = f"send {neutral} or null, or leave it out" if neutral else "send null, or leave it out"
        scalar = isinstance(value, str | int | float)
        shown = f"{shorten(json.dumps(value), 40)} is refused: " if scalar else ""
        # Passed as a variable, since the text itself may have braces.
        message = {"message": f"{shown}{self.reason}; {instead}"}
        raise PydanticCustomError(NOT_IMPLEMENTED, "{message}", message)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": list(self.values), "description": f"not implemented: {self.reason}"}


def _same_json(value: Any, neutral: Any) -> bool:
    """True if both are the same JSON value. In Python 0 equals False and 1 equals True; in JSON they differ."""
    return bool(value == neutral) and isinstance(value, bool) is isinstance(neutral, bool)


OLD_TOOLS = "the older form of tools; send tools, tool_choice and tool_calls instead"
_WRITES_TEXT = "answers are text"
_STRUCTURED = "structured_outputs has answers of a form"
_READS_TEXT = "this server reads text only"
_ONE_QUEUE = "all requests wait in one queue, which priority orders"
_NO_SUMMARY = "reasoning is not summarized: an item of type reasoning has its text"


class Table(BaseModel):
    """Base class for fields that are not implemented. Only neutral values of these fields are accepted."""

    model_config = BODY


class OpenAISharedFields(Table):
    """Fields that OpenAI's `POST /v1/chat/completions` and its `POST /v1/responses` share, and that are not
    implemented."""

    moderation: Annotated[Any, Neutral(reason="neither prompts nor answers are moderated")] = None
    prompt_cache_options: Annotated[Any, Neutral({}, reason="the prefix cache has no options")] = None
    prompt_cache_retention: Annotated[
        Any, Neutral("in_memory", "in-memory", reason="prefixes are cached in memory, until room is needed")
    ] = None
    service_tier: Annotated[Any, Neutral("auto", "default", reason=_ONE_QUEUE)] = None
    store: Annotated[
        Any, Neutral(False, reason="answers are not stored: send the whole conversation with each request")
    ] = None


class OpenAIChatFields(OpenAISharedFields):
    """Fields of OpenAI's `POST /v1/chat/completions` that are not implemented."""

    audio: Annotated[Any, Neutral(reason=_WRITES_TEXT)] = None
    function_call: Annotated[Any, Neutral("none", "auto", reason=OLD_TOOLS)] = None
    functions: Annotated[Any, Neutral([], reason=OLD_TOOLS)] = None
    modalities: Annotated[Any, Neutral(["text"], reason=_WRITES_TEXT)] = None
    verbosity: Annotated[Any, Neutral("medium", reason="ask for short answers in a message")] = None
    web_search_options: Annotated[Any, Neutral(reason="the web is not searched")] = None


_NOTHING_STORED = "nothing is stored here: send the items themselves as input"
_FUNCTIONS_ONLY = "tools are functions, which the client calls"


class OpenAIResponsesFields(OpenAISharedFields):
    """Fields of OpenAI's `POST /v1/responses` that are not implemented, and fields that only other routes have."""

    access_programs: Annotated[Any, Neutral({}, reason="there are no access programs")] = None
    background: Annotated[Any, Neutral(False, reason="answers are not stored: stream them")] = None
    background_options: Annotated[Any, Neutral({}, reason="answers are not stored: stream them")] = None
    context_management: Annotated[Any, Neutral([], reason="conversations are not compacted")] = None
    conversation: Annotated[Any, Neutral(reason=_NOTHING_STORED)] = None
    echo: Annotated[Any, Neutral(False, reason="completions and chat have echo")] = None
    enable_response_messages: Annotated[Any, Neutral(False, reason="a response has items")] = None
    image: Annotated[Any, Neutral({}, reason=_READS_TEXT)] = None
    max_tool_calls: Annotated[
        Any, Neutral(reason=f"it bounds calls of built-in tools; {_FUNCTIONS_ONLY}")
    ] = None
    n: Annotated[Any, Neutral(1, reason="a response is one answer; completions and chat have n")] = None
    previous_input_messages: Annotated[Any, Neutral(reason=_NOTHING_STORED)] = None
    previous_response_id: Annotated[Any, Neutral(reason=_NOTHING_STORED)] = None
    prompt: Annotated[Any, Neutral(reason=_NOTHING_STORED)] = None
    prompt_logprobs: Annotated[Any, Neutral(reason="completions and chat have prompt_logprobs")] = None
    response_format: Annotated[Any, Neutral(reason="use text.format")] = None
    return_token_ids: Annotated[Any, Neutral(False, reason="completions and chat have return_token_ids")] = (
        None
    )


class OpenAITextFields(Table):
    """Fields of `text`, in the body of responses, that are not implemented."""

    verbosity: Annotated[Any, Neutral("medium", reason="ask for short answers in instructions")] = None


class OpenAIReasoningFields(Table):
    """Fields of `reasoning`, in the body of responses, that are not implemented."""

    context: Annotated[Any, Neutral("auto", reason="the template decides which reasoning it shows")] = None
    generate_summary: Annotated[Any, Neutral("auto", reason=_NO_SUMMARY)] = None
    mode: Annotated[Any, Neutral("standard", reason="there is one mode")] = None
    summary: Annotated[Any, Neutral("auto", reason=_NO_SUMMARY)] = None


class OpenAIInputFields(Table):
    """Fields of the items of an `input`, in the body of responses, that are not implemented."""

    caller: Annotated[Any, Neutral({"type": "direct"}, reason=_FUNCTIONS_ONLY)] = None
    encrypted_content: Annotated[Any, Neutral("", reason="only its maker can read it; send content")] = None
    namespace: Annotated[Any, Neutral(reason=_FUNCTIONS_ONLY)] = None


class OpenAIToolFields(Table):
    """Fields of a function in `tools`, in a body of `/v1/responses`. Only their neutral values are accepted."""

    allowed_callers: Annotated[Any, Neutral(["direct"], reason=_FUNCTIONS_ONLY)] = None
    async_: Annotated[Any, Neutral(False, reason="the client decides when it calls a function")] = Field(
        default=None, alias="async"
    )
    defer_loading: Annotated[Any, Neutral(False, reason="the prompt has all functions")] = None
    output_schema: Annotated[
        Any, Neutral(reason="the prompt has names, descriptions and parameters; describe the results there")
    ] = None


class OpenAIPartFields(Table):
    """Fields of the parts of an input item's `content` or `output` that are not implemented."""

    annotations: Annotated[Any, Neutral([], reason="send the text alone")] = None
    prompt_cache_breakpoint: Annotated[Any, Neutral(reason="all whole blocks of a prompt are cached")] = None


class OpenAICompletionFields(Table):
    """Fields of OpenAI's `POST /v1/completions` that are not implemented."""

    suffix: Annotated[Any, Neutral("", reason="text is not inserted, only continued")] = None


class OpenAIStreamFields(Table):
    """Fields of OpenAI's `stream_options` that are not implemented. Only their neutral values are accepted."""

    include_obfuscation: Annotated[Any, Neutral(False, reason="chunks are not padded")] = None


class OpenAIMessageFields(Table):
    """Fields of messages in OpenAI's and vLLM's answers that are not implemented. Their neutral values are
    accepted, so that a client can send such a message back as it is."""

    refusal: Annotated[Any, Neutral(reason="send the message's text as content")] = None
    annotations: Annotated[Any, Neutral([], reason="send the message's text as content")] = None
    audio: Annotated[Any, Neutral(reason=_READS_TEXT)] = None
    function_call: Annotated[Any, Neutral(reason=OLD_TOOLS)] = None


class VllmFields(Table):
    """Fields that vLLM adds to the bodies of completions, chat and responses, and that are not implemented."""

    ec_transfer_params: Annotated[Any, Neutral({}, reason="nothing is transferred between servers")] = None
    guided_choice: Annotated[Any, Neutral(reason=_STRUCTURED)] = None
    guided_decoding_backend: Annotated[Any, Neutral(reason=_STRUCTURED)] = None
    guided_grammar: Annotated[Any, Neutral(reason=_STRUCTURED)] = None
    guided_json: Annotated[Any, Neutral(reason=_STRUCTURED)] = None
    guided_regex: Annotated[Any, Neutral(reason=_STRUCTURED)] = None
    guided_whitespace_pattern: Annotated[Any, Neutral(reason=_STRUCTURED)] = None
    kv_transfer_params: Annotated[Any, Neutral({}, reason="nothing is transferred between servers")] = None
    length_penalty: Annotated[Any, Neutral(1.0, reason="there is no beam search")] = None
    logits_processors: Annotated[Any, Neutral([], reason="clients cannot send code")] = None
    repetition_detection: Annotated[Any, Neutral(reason="frequency_penalty works against repetition")] = None
    request_id: Annotated[Any, Neutral(reason="send it as the header x-request-id")] = None
    return_token_offsets: Annotated[Any, Neutral(False, reason="logprobs has text_offset")] = None
    return_tokens_as_token_ids: Annotated[Any, Neutral(False, reason="return_token_ids has the ids")] = None
    spaces_between_special_tokens: Annotated[
        Any, Neutral(True, reason="spaces are decoded as the tokenizer has them")
    ] = None
    structural_tag: Annotated[Any, Neutral(reason=_STRUCTURED)] = None
    thinking_token_budget: Annotated[Any, Neutral(-1, reason="the model decides how long it thinks")] = None
    use_beam_search: Annotated[Any, Neutral(False, reason="tokens are sampled; temperature 0 is greedy")] = (
        None
    )
    vllm_xargs: Annotated[Any, Neutral({}, reason="there are no extensions")] = None


class VllmChatFields(Table):
    """Fields that vLLM adds to the body of chat, and that are not implemented."""

    best_of: Annotated[Any, Neutral(reason="every choice is sent; n says how many")] = None
    include_reasoning: Annotated[Any, Neutral(True, reason="thoughts have their own field")] = None
    return_assistant_tokens_mask: Annotated[
        Any, Neutral(False, reason="answers of chat do not show the prompt")
    ] = None
    return_prompt_text: Annotated[Any, Neutral(False, reason="answers of chat do not show the prompt")] = None


class VllmCompletionFields(Table):
    """Fields that vLLM adds to the body of completions, and that are not implemented."""

    prompt_embeds: Annotated[Any, Neutral(reason="prompts are text or token ids")] = None


class TemplateFields(Table):
    """Fields for the chat template, in the bodies of chat, responses and `/tokenize`, that are not implemented."""

    documents: Annotated[Any, Neutral([], reason="put documents into a message")] = None
    chat_template: Annotated[Any, Neutral(reason="the template comes with the model")] = None
    media_io_kwargs: Annotated[Any, Neutral({}, reason=_READS_TEXT)] = None
    mm_processor_kwargs: Annotated[Any, Neutral({}, reason=_READS_TEXT)] = None


class VllmStructuredFields(Table):
    """Fields of vLLM's `structured_outputs` that are not implemented."""

    json_object: Annotated[
        Any, Neutral(False, reason='response_format with type "json_object" does this')
    ] = None
    disable_additional_properties: Annotated[
        Any, Neutral(False, reason='the schema says it: "additionalProperties": false')
    ] = None
    disable_any_whitespace: Annotated[Any, Neutral(False, reason="the model chooses white space")] = None
    disable_fallback: Annotated[Any, Neutral(False, True, reason="one library compiles all grammars")] = None
    structural_tag: Annotated[Any, Neutral(reason="send json, regex, choice or grammar")] = None
    whitespace_pattern: Annotated[Any, Neutral(reason="the model chooses white space")] = None


#: The classes of fields that are not implemented, by the names of the bodies or objects that have the fields.
TABLES: dict[str, type[Table]] = {
    "chat": OpenAIChatFields,
    "responses": OpenAIResponsesFields,
    "`text` of responses": OpenAITextFields,
    "`reasoning` of responses": OpenAIReasoningFields,
    "`input` of responses": OpenAIInputFields,
    "parts of an `input`": OpenAIPartFields,
    "`tools` of responses": OpenAIToolFields,
    "completions": OpenAICompletionFields,
    "all three (vLLM)": VllmFields,
    "chat (vLLM)": VllmChatFields,
    "completions (vLLM)": VllmCompletionFields,
    "chat, responses and `/tokenize`": TemplateFields,
    "`stream_options`": OpenAIStreamFields,
    "`structured_outputs`": VllmStructuredFields,
    "`messages`": OpenAIMessageFields,
}


def lines_of(table: type[BaseModel]) -> dict[str, Neutral]:
    """Return the `Neutral` of each field of a body or of a `Table` that is not implemented, by the field's name in
    JSON."""
    return {
        field.alias or name: each
        for name, field in table.model_fields.items()
        for each in field.metadata
        if isinstance(each, Neutral)
    }
