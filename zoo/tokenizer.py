"""Trains the zoo's three tokenizers on text of `zoo.text`, each built like the tokenizers of its family.

===========  ==========================================================  ======================
model        pieces                                                      begins with
===========  ==========================================================  ======================
llama-tiny   byte-level BPE: every byte is a letter of the alphabet      ``<|begin_of_text|>``
qwen3-tiny   byte-level BPE                                              nothing
gemma3-tiny  BPE on characters, spaces written as ``▁``; characters not  ``<bos>``
             in the vocabulary become bytes, ``<0x00>`` … ``<0xFF>``
===========  ==========================================================  ======================

All three are trained on text *without* emoji. So an emoji is always several tokens, as it often is in real
vocabularies, and a server has to hold back text until the last of them.
"""

import json
import re
from collections.abc import Iterable, Iterator

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

# Splits a text into words with the space before them, up to three digits, marks, and white space.
SPLIT = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*\n+|\s+(?!\S)|\s+"

LLAMA_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
GEMMA_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")

LLAMA_CHAT = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN_CHAT = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Gemma has no system role: a system message opens the first user turn. The assistant is called "model".
GEMMA_CHAT = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- set opening = messages[0]['content'] + '\\n\\n' %}
{%- set turns = messages[1:] %}
{%- else %}
{%- set opening = '' %}
{%- set turns = messages %}
{%- endif %}
{%- for message in turns %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + (opening if loop.first else '') + message['content'] | trim }}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<start_of_turn>model\\n' }}
{%- endif %}
"""


def without_emoji(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts without characters from U+2100 on: emoji are dropped, accented letters stay."""
    for text in texts:
        yield re.sub(r"[^\u0000-\u20ff]", "", text)


def byte_level(texts: Iterable[str], size: int, special: tuple[str, ...]) -> Tokenizer:
    """Train a byte-level BPE tokenizer of at most ``size`` pieces. The special tokens have the highest ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(without_emoji(texts), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def prepend(tokenizer: Tokenizer, token: str) -> processors.TemplateProcessing:
    """Return a post-processor that puts ``token`` in front of every text."""
    return processors.TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token}:1 $B:1",
        special_tokens=[(token, tokenizer.token_to_id(token))],
    )


def llama(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a tokenizer like Llama 3's: byte-level BPE, and a beginning-of-text token in front."""
    tokenizer = byte_level(texts, size, LLAMA_SPECIAL)
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), prepend(tokenizer, LLAMA_SPECIAL[0])]
    )
    return tokenizer


def qwen(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a tokenizer like Qwen 3's: byte-level BPE, text normalized to NFC, no token in front."""
    tokenizer = byte_level(texts, size, QWEN_SPECIAL)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def gemma(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a tokenizer like Gemma's: BPE on characters, ``▁`` for a space, bytes for characters without a piece.

    First a temporary tokenizer is trained on texts that are split into words and marks, so no piece spans two
    words. The returned tokenizer has the same vocabulary and merges and, like Gemma's, does not split a text.
    The byte pieces are ordinary pieces: if they were added tokens, ``<0x41>`` in a text would turn into an A.
    """
    draft = Tokenizer(models.BPE())
    draft.normalizer = normalizers.Replace(" ", "▁")
    draft.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁?\p{L}+|\n+|."), behavior="isolated")
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*GEMMA_SPECIAL, *byte_pieces], show_progress=False
    )
    draft.train_from_iterator(without_emoji(texts), trainer)
    learned = json.loads(draft.to_str())["model"]

    tokenizer = Tokenizer(
        models.BPE(
            vocab=learned["vocab"],
            merges=[(left, right) for left, right in learned["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in GEMMA_SPECIAL]
    )
    tokenizer.post_processor = prepend(tokenizer, "<bos>")
    return tokenizer
