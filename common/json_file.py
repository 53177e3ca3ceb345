"""Reads a checkpoint's JSON files: its configurations, and the index of its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.errors import StartupError


def read_json(path: Path) -> dict[str, Any]:
    """Read a checkpoint's JSON file. A byte-order mark at its start is skipped.

    Raises:
        StartupError: the file is missing, unreadable, or holds no object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise StartupError(f"{path.parent} has no {path.name}: is it a Hugging Face checkpoint?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise StartupError(f"{path} must hold a JSON object")
    return content


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Read a checkpoint's JSON file. Returns an empty object if there is no file.

    Raises:
        StartupError: the file is unreadable, or holds no object.
    """
    return read_json(path) if path.is_file() else {}
