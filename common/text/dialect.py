"""A model's dialect: how it marks its thoughts and its tool calls, and whether its chat template shows it tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from common.errors import InvalidRequestError
from common.text.chat_template import ChatTemplate
from common.text.tokenizer import Tokenizer

CallSyntax = Literal["hermes", "llama3_json", "mistral", "pythonic"]
ToolCallParser = Literal["auto", "hermes", "llama3_json", "mistral", "pythonic"] | None
ReasoningParser = Literal["auto", "think"] | None

#: Markers of a model's thoughts, and of calls in the syntax of Hermes.
THOUGHT_MARKERS = ("<think>", "</think>")
HERMES_MARKERS = ("<tool_call>", "</tool_call>")

#: The token of Llama 3 before a call.
PYTHON_TAG = "<|python_tag|>"

#: The token of Mistral before calls, and those behind the name in the form of models since 2025.
MISTRAL_MARKER = "[TOOL_CALLS]"
CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"

#: The marker before calls by syntax, where text may come before it.
CALL_MARKERS: Mapping[CallSyntax, str] = {"hermes": HERMES_MARKERS[0], "mistral": MISTRAL_MARKER}

#: Syntaxes of calls, each with texts. A template that contains all texts of an entry uses its syntax. The first
#: such entry counts, so the most certain entries are first.
_SIGNS: tuple[tuple[CallSyntax, tuple[str, ...]], ...] = (
    ("hermes", (HERMES_MARKERS[0], "arguments")),
    ("mistral", (MISTRAL_MARKER,)),
    ("pythonic", ("[func_name1(",)),
    ("pythonic", ("tool_code",)),
    ("pythonic", ("<start_of_turn>",)),
    ("llama3_json", (PYTHON_TAG,)),
    ("llama3_json", ('[{"name": "tool_call_name"',)),
    ("llama3_json", ("parameters", "<|start_header_id|>")),
)

#: Texts of templates whose calls have another form than a sign of theirs suggests: XML between the markers of
#: Hermes (Qwen 3 Coder, GLM), calls of FunctionGemma, `>>>name` (Functionary), and a list between markers (Apriel).
_OTHER_FORMS = ("<function=", "<arg_key>", "<start_function_call>", ">>>all", "<tool_calls>")


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one model marks its thoughts and calls.

    Attributes:
        template: renders conversations; None: the model has no template.
        calls: the syntax of its tool calls; None: the server takes no tools.
        knows_tools: whether the chat template writes tools and calls. If not, `common.constrained.tool_calls`
            writes them.
        thinks: whether an answer may begin with thoughts.
        special: the token ids of markers that are single tokens. A grammar names these markers by their ids. If
            they are special tokens, an answer's text leaves them out unless the request says otherwise.
    """

    template: ChatTemplate | None = None
    calls: CallSyntax | None = None
    knows_tools: bool = False
    thinks: bool = False
    special: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, calls: ToolCallParser = "auto", reasoning: ReasoningParser = "auto"
    ) -> Dialect:
        """Return the dialect of a tokenizer's chat template. Without a template, the dialect has no tools and no
        thoughts.

        Args:
            tokenizer: the model's tokenizer.
            calls: the syntax of calls; `auto`: the one found in the template's text, else that of Hermes; None:
                tools are refused.
            reasoning: how the model marks thoughts (its reasoning before the answer): `think`, between `<think>`
                and `</think>`; None: not at all, so thoughts stay in the answer's text; `auto`: `think` if the
                template has the text `</think>`, else None.
        """
        template = tokenizer.chat_template
        if template is None:
            return cls()
        known = _syntax_of(template.for_tools.source)
        markers = (*THOUGHT_MARKERS, *HERMES_MARKERS, PYTHON_TAG, MISTRAL_MARKER, CALL_ID, ARGS)
        ids = {marker: tokenizer.backend.token_to_id(marker) for marker in markers}
        return cls(
            template=template,
            calls=(known or "hermes") if calls == "auto" else calls,
            knows_tools=template.for_tools.reads("tools") and (known is not None or calls != "auto"),
            thinks=reasoning == "think" or (reasoning == "auto" and THOUGHT_MARKERS[1] in template.source),
            special={marker: number for marker, number in ids.items() if number is not None},
        )

    def opens_thought(self, variables: Mapping[str, Any] | None = None) -> bool:
        """Return whether the chat template ends a prompt with the marker that opens a thought.

        Returns False if the answers of this dialect have no thoughts, or if the template rejects a short message.
        `variables`: further variables of the template.
        """
        if not self.thinks or self.template is None:
            return False
        try:
            return opens_thought(
                self.template.render([{"role": "user", "content": "?"}], variables=variables)
            )
        except InvalidRequestError:  # raised again for the conversation, with a reason
            return False


def _syntax_of(source: str) -> CallSyntax | None:
    """Return the syntax in which a template asks the model to write calls; None if it is not a known syntax."""
    if any(sign in source for sign in _OTHER_FORMS):
        return None
    return next((syntax for syntax, signs in _SIGNS if all(sign in source for sign in signs)), None)


def opens_thought(prompt: str) -> bool:
    """Return whether a prompt ends with the marker that opens a thought."""
    return prompt.rstrip().endswith(THOUGHT_MARKERS[0])
