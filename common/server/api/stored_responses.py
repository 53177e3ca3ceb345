"""Responses that the server keeps in memory, so that a client can refer to them: by `previous_response_id`, by an
`item_reference`, or by `GET /v1/responses/{id}`.

```text
POST /v1/responses                     ── completed ──> input, response     least recently used first out
POST … previous_response_id: resp_1    <──────────────  input + output of resp_1
POST … item_reference: msg_1_0         <──────────────  that item of resp_1, whose id is in the item's
```

A response belongs to the API key that it was requested with. Other keys do not find it.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from common.server.errors import ApiError, shorten

#: Most bytes of all stored responses together.
MAX_STORED_BYTES = 64 * 2**20


class Stored(NamedTuple):
    """A stored response.

    Attributes:
        owner: the digest of the API key that the response belongs to.
        input: the JSON list of all items of its conversation, those of earlier responses included.
        response: the JSON of the response.
    """

    owner: bytes
    input: bytes
    response: bytes

    @property
    def output(self) -> list[dict[str, Any]]:
        output: list[dict[str, Any]] = orjson.loads(self.response)["output"]
        return output

    def input_items(self, response_id: str) -> list[dict[str, Any]]:
        """Return the items of the conversation as OpenAI lists them: each with an id, and contents as parts."""
        items: list[dict[str, Any]] = orjson.loads(self.input)
        for number, item in enumerate(items):
            item.setdefault("id", f"in_{response_id.removeprefix('resp_')}_{number}")
            if isinstance(item.get("content"), str):
                kind = "output_text" if item["role"] == "assistant" else "input_text"
                part = {"type": kind, "text": item["content"]}
                item["content"] = [part | ({"annotations": []} if kind == "output_text" else {})]
            if item["type"] in ("message", "function_call_output"):
                item.setdefault("status", "completed")
        return items

    @property
    def num_bytes(self) -> int:
        return len(self.input) + len(self.response)


class ResponseStore:
    """Keeps the most recently used responses. Threads may share it.

    Args:
        limit: most responses; 0: none is stored.
        max_bytes: most bytes of all of them together.
    """

    def __init__(self, limit: int, max_bytes: int = MAX_STORED_BYTES) -> None:
        self.limit = limit
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._stored: OrderedDict[str, Stored] = OrderedDict()  # least recently used first
        self._num_bytes = 0

    def put(self, response_id: str, stored: Stored) -> None:
        """Store a response. Drops the least recently used ones beyond the bounds."""
        with self._lock:
            self._stored[response_id] = stored
            self._num_bytes += stored.num_bytes
            while len(self._stored) > self.limit or self._num_bytes > self._max_bytes:
                _, dropped = self._stored.popitem(last=False)
                self._num_bytes -= dropped.num_bytes

    def find(self, owner: bytes, response_id: str) -> Stored | None:
        """Return a response of this owner, and count it as used; None if there is none."""
        with self._lock:
            stored = self._stored.get(response_id)
            if stored is None or stored.owner != owner:
                return None
            self._stored.move_to_end(response_id)
            return stored

    def get(self, owner: bytes, response_id: str) -> Stored:
        """Return a response of this owner. Raises ApiError (404) if there is none."""
        stored = self.find(owner, response_id)
        if stored is None:
            raise self._not_found("response", response_id, "response_id", "response_not_found")
        return stored

    def remove(self, owner: bytes, response_id: str) -> None:
        """Forget a response of this owner. Raises ApiError (404) if there is none."""
        self.get(owner, response_id)
        with self._lock:
            removed = self._stored.pop(response_id, None)
            self._num_bytes -= 0 if removed is None else removed.num_bytes

    def conversation(self, owner: bytes, response_id: str) -> bytes:
        """Return the JSON list of the items of a response's conversation, its output included.

        Raises:
            ApiError: 404, this owner has no such response.
        """
        stored = self.find(owner, response_id)
        if stored is None:
            name = "previous_response_id"
            raise self._not_found("response", response_id, name, "previous_response_not_found")
        return orjson.dumps([*orjson.loads(stored.input), *stored.output])

    def item(self, owner: bytes, item_id: str) -> dict[str, Any]:
        """Return an item of a stored response's output. Raises ApiError (404) if this owner has none of this id."""
        stored = self.find(owner, response_of(item_id))
        for item in () if stored is None else stored.output:
            if item["id"] == item_id:
                return item
        raise self._not_found("item", item_id, "input", "item_not_found")

    def _not_found(self, kind: str, name: str, param: str, code: str) -> ApiError:
        kept = f"the latest {self.limit} responses are stored" if self.limit else "no responses are stored"
        message = f"{param}: there is no {kind} {shorten(name, 100)!r}; {kept} (--max-stored-responses)"
        return ApiError(404, message, param=param, code=code)


def response_of(item_id: str) -> str:
    """Return the id of the response whose output has an item of this id."""
    return f"resp_{item_id.partition('_')[2].rpartition('_')[0]}"


def owner_of(headers: Mapping[str, str]) -> bytes:
    """Return the digest of the API key in a request's headers, or of an empty key if there is none."""
    key = headers.get("authorization", "").partition(" ")[2] or headers.get("x-api-key", "")
    return hashlib.sha256(key.strip().encode("latin-1")).digest()
