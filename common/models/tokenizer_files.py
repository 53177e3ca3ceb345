"""Reads the tokenizer of a checkpoint without the checkpoint's config and weights.

A server's process does so. The engine's process has found the files, and has read the rest.
"""

from __future__ import annotations

from pathlib import Path

from common.models.gguf.file import GGUFFile
from common.models.gguf.tokenizer import GGUFVocabulary
from common.text.tokenizer import Tokenizer


def open_tokenizer(files: Path, *, vocab_size: int, chat_template: Path | None = None) -> Tokenizer:
    """Read the tokenizer in a folder or in a GGUF file. The file `chat_template` replaces its chat template.

    Raises:
        StartupError: the tokenizer or the template cannot be read.
    """
    if files.is_dir():
        return Tokenizer.from_folder(files, vocab_size=vocab_size, chat_template=chat_template)
    vocabulary = GGUFVocabulary(GGUFFile.open(files))
    return gguf_tokenizer(vocabulary, files, vocab_size=vocab_size, chat_template=chat_template)


def gguf_tokenizer(
    vocabulary: GGUFVocabulary, file: Path, *, vocab_size: int, chat_template: Path | None
) -> Tokenizer:
    """Return the tokenizer of a vocabulary that was read from `file`. Otherwise as `open_tokenizer`."""
    return Tokenizer(
        vocabulary.backend(),
        vocab_size=vocab_size,
        chat_template=vocabulary.chat_template(chat_template),
        files=file,
    )
