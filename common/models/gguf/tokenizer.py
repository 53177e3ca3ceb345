"""Builds a tokenizer and a chat template from the metadata of a GGUF file.

A GGUF file has no `tokenizer.json`. Its metadata has the tokens, and names one of two kinds of tokenizer:

- `gpt2` is byte-level BPE. The metadata also has the merges, and names a pre-tokenizer, which splits a text before
  merges are applied.
- `llama` is SentencePiece's BPE. Its merges follow the scores of the tokens that they make.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from common.errors import StartupError
from common.models.gguf.file import GGUFFile
from common.text.chat_template import FOR_TOOLS, ChatTemplate

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # types of tokens

#: Special tokens whose texts say that they end an answer, as in llama.cpp (`special_eog_ids`): a file has one entry
#: for EOS, and Qwen's models end with two tokens. Left out are those of other architectures, those between files of
#: code, and `</s>`, an HTML tag to Gemma.
_ENDS = {
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end|>",
    "<end_of_turn>",
    "<eos>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
}

_LONGEST = 4096  # characters of a token

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _split_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": _split_digits,
    "llama-bpe": lambda: _split_by(_LLAMA_3),
    "qwen2": lambda: _split_by(_QWEN_2),
}
#: Some of llama.cpp's other names of these pre-tokenizers.
_SAME_AS = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "mellum": "gpt-2",
}


class GGUFVocabulary:
    """The tokenizer and the chat template of a GGUF file, from its metadata entries `tokenizer.*`."""

    def __init__(self, file: GGUFFile) -> None:
        self._path = file.path
        self._metadata = file.metadata
        self._tokens: list[str] = self._entry("tokens", [])
        if not isinstance(self._tokens, list) or not all(isinstance(each, str) for each in self._tokens):
            raise StartupError(f"{self._path}: its tokens are not a list of texts")
        self._types: list[int] = self._entry("token_type", [1] * len(self._tokens))
        if (
            not isinstance(self._types, list)
            or len(self._types) != len(self._tokens)
            or len(set(self._tokens)) != len(self._tokens)
        ):
            raise StartupError(f"{self._path}: its tokens do not fit their types, or repeat")
        if (longest := max(map(len, self._tokens), default=0)) > _LONGEST:
            raise StartupError(f"{self._path}: it has a token of {longest} characters")

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def _entry(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _token(self, key: str) -> str | None:
        """Return the token whose id is the entry `{key}_token_id`, or None if there is no such entry or token.

        Raises:
            StartupError: the entry is the one for BOS or EOS, and there is no token with this id.
        """
        token_id = self._entry(f"{key}_token_id")
        if type(token_id) is int and 0 <= token_id < len(self._tokens):
            return self._tokens[token_id]
        if token_id is not None and key in ("bos", "eos"):
            raise StartupError(f"{self._path}: {self._not_a_token(key, token_id)}")
        return None

    def _not_a_token(self, key: str, token_id: Any) -> str:
        return f"{key}_token_id = {token_id!r} is none of its {len(self._tokens)} tokens"

    def unused(self) -> list[str]:
        """Return the metadata that the server does not use, in words: ids of no token, and named templates."""
        keys = ("unknown", "padding", "eot", "eom")
        found = {key: self._entry(f"{key}_token_id") for key in keys if self._token(key) is None}
        prefix = "tokenizer.chat_template."
        templates = [key.removeprefix(prefix) for key in self._metadata if key.startswith(prefix)]
        templates = [name for name in templates if name != FOR_TOOLS]
        return [
            *(self._not_a_token(key, token_id) for key, token_id in found.items() if token_id is not None),
            *([f"chat templates: {', '.join(templates)}"] if templates else []),
        ]

    def end_token_ids(self) -> list[int]:
        """Return the ids of the tokens that end an answer, in ascending order.

        They are the tokens of the file's entries for EOS, end of turn and end of message, the special tokens in
        `_ENDS`, and the one that the chat template writes after an answer. All of them may be missing.

        Raises:
            StartupError: the entry for EOS names no token.
        """
        added = self._added()
        ends = [self._token(key) for key in ("eos", "eot", "eom")] + [each for each in added if each in _ENDS]
        with contextlib.suppress(StartupError):  # another template may replace an invalid one
            template = self.chat_template()
            ends.append(None if template is None else template.end_of_turn(added))
        return sorted({self._tokens.index(token) for token in ends if token is not None})

    def _added(self) -> list[str]:
        """Return the tokens that are found in a text before it is split."""
        return [
            token
            for token, kind in zip(self._tokens, self._types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]

    def chat_template(self, file: Path | None = None) -> ChatTemplate | None:
        """Return the chat template in `file`. Without `file`, return the GGUF file's own, or None if it has none.

        If the tokenizer adds BOS to texts, BOS is put before a conversation whose template does not write it.
        llama.cpp does so, and tools that write GGUF files count on it: they remove BOS from the template.

        Raises:
            StartupError: the template cannot be read or is not a template, or the entry of a special token, such
                as BOS, names no token.
        """
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        tokens = {f"{name}_token": self._token(key) for name, key in names.items()}
        special = {name: token for name, token in tokens.items() if token is not None}
        template = self._own_template(special) if file is None else ChatTemplate.from_file(file, special)
        if template is not None and (bos := self._added_bos()) is not None:
            template.begin_with(bos)
        return template

    def _own_template(self, special: dict[str, str]) -> ChatTemplate | None:
        for_tools: ChatTemplate | None = None
        source = self._source(f"tokenizer.chat_template.{FOR_TOOLS}")
        if source is not None:
            for_tools = ChatTemplate.compiled(source, special, origin=self._path)
        source = self._source("tokenizer.chat_template")
        return (
            None if source is None else ChatTemplate.compiled(source, special, for_tools, origin=self._path)
        )

    def _source(self, key: str) -> str | None:
        source = self._metadata.get(key)
        if source is not None and not isinstance(source, str):
            raise StartupError(f"{self._path}: {key} must be a text, not {source!r:.80}")
        return source

    def backend(self) -> Tokenizer:
        """Build the tokenizer.

        Raises:
            StartupError: the GGUF file has no tokenizer, or one of a kind that is not implemented, or its merges do
                not fit its tokens.
        """
        match self._entry("model"):
            case "gpt2":
                tokenizer = self._byte_level()
            case "llama":
                tokenizer = self._sentencepiece()
            case kind:
                raise StartupError(
                    f"{self._path}: tokenizer.ggml.model {kind!r} is not implemented; it is not gpt2 or llama"
                )
        ids = self._ids(self._tokens)
        tokenizer.add_tokens(
            [
                AddedToken(token, normalized=False, special=self._types[ids[token]] == _CONTROL)
                for token in self._added()
                if tokenizer.token_to_id(token) is not None
            ]
        )
        self._add_bos_and_eos(tokenizer)
        return tokenizer

    def _byte_level(self) -> Tokenizer:
        name = self._pre_tokenizer()
        if not isinstance(name, str) or name not in _PRE_TOKENIZERS:
            raise StartupError(
                f"{self._path}: the pre-tokenizer {name!r:.80} is not implemented; it is not one of "
                f"{', '.join((*_PRE_TOKENIZERS, *_SAME_AS))}"
            )
        try:
            merges = [tuple(merge.split(" ")) for merge in self._entry("merges", [])]
            model = BPE(self._ids(self._tokens), merges, ignore_merges=name == "llama-bpe")
        except Exception as error:  # the library's only class of errors, or an entry of another type
            raise StartupError(f"{self._path}: its merges do not fit its tokens: {error}") from None
        tokenizer = Tokenizer(model)
        if name == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = _PRE_TOKENIZERS[name]()
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _pre_tokenizer(self) -> Any:
        name = self._entry("pre")
        return _SAME_AS.get(str(name), name)

    def _sentencepiece(self) -> Tokenizer:
        # Gemma's tokens of several spaces are stored as spaces. But when tokens are looked up, the text has "▁" for
        # each space.
        tokens = [token if token.strip(" ") else "▁" * len(token) for token in self._tokens]
        ids = self._ids(tokens)
        merges = _merges(self._scores(tokens), ids)
        tokenizer = Tokenizer(
            BPE(ids, merges, unk_token=self._token("unknown"), fuse_unk=True, byte_fallback=True)
        )
        spaces = normalizers.Replace(" ", "▁")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._entry("add_space_prefix", True):
            # Each text between special tokens is normalized by itself, so each gets its space, as in llama.cpp.
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
            tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", left=1)])
        else:
            tokenizer.normalizer = spaces
            tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer

    def _scores(self, tokens: list[str]) -> dict[str, float]:
        """Return the score of each token that merges may make.

        User-defined tokens have the highest score: SentencePiece looks for them before it merges. If the file has
        no scores, or the same score for all (a converter's placeholder), smaller ids have higher scores.

        Raises:
            StartupError: the scores are not a list of numbers, one for each token.
        """
        scores = self._entry("scores", [0.0] * len(tokens))
        if (
            not isinstance(scores, list)
            or len(scores) != len(tokens)
            or not all(isinstance(score, float) and math.isfinite(score) for score in scores)
        ):
            raise StartupError(f"{self._path}: its scores are not one number for each of its tokens")
        found = {
            token: math.inf if kind == _USER_DEFINED else score
            for token, score, kind in zip(tokens, scores, self._types, strict=True)
            if kind not in (_UNKNOWN, _CONTROL, _BYTE)
        }
        if len(set(found.values()) - {math.inf}) == 1:
            return {
                token: -float(place) if math.isfinite(score) else score
                for place, (token, score) in enumerate(found.items())
            }
        return found

    @staticmethod
    def _ids(tokens: list[str]) -> dict[str, int]:
        return {token: index for index, token in enumerate(tokens)}

    def _add_bos_and_eos(self, tokenizer: Tokenizer) -> None:
        """Make the tokenizer add BOS and EOS to every text, if the file's entries say so. By default, no EOS."""
        bos = self._added_bos()
        eos = self._token("eos") if self._entry("add_eos_token", False) else None
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[token for token in (bos, "$A", eos) if token is not None],
            special_tokens=[(token, self._tokens.index(token)) for token in (bos, eos) if token is not None],
        )

    def _added_bos(self) -> str | None:
        """Return the token BOS if the tokenizer adds it to every text.

        Without an entry that says so, it is added by the tokenizers for which llama.cpp adds it.
        """
        by_default = self._entry("model") == "llama" or self._pre_tokenizer() == "llama-bpe"
        return self._token("bos") if self._entry("add_bos_token", by_default) else None


def _merges(scores: dict[str, float], ids: Container[str]) -> list[tuple[str, str]]:
    """Return SentencePiece's merges by priority: those with the highest scores first.

    SentencePiece prefers the leftmost of several merges with the same score. Our library has no merges of the same
    priority. So the merge with the longest left part comes first, as in transformers: in a run of spaces, whose
    tokens have the same score in Mistral's vocabulary, it is the leftmost.

    Args:
        scores: the score of each token that merges may make.
        ids: all tokens.
    """
    merges = [
        (token[:cut], token[cut:])
        for token in scores
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return sorted(merges, key=lambda pair: (-scores[pair[0] + pair[1]], -len(pair[0]), -len(pair[1])))
