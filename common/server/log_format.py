"""How a line of the log is written: as text for people, or as JSON for programs.

```json
{"time": "2026-01-31T12:00:00.123Z", "level": "INFO", "message": "ready: …", "logger": "common.server.serve"}
```

A line about a request has its numbers as fields beside the message, and one about an exception its `traceback`.
"""

from __future__ import annotations

import datetime
import json
import logging
from typing import Any, Literal

#: The attribute of a log record that holds its fields: `logger.info(…, extra={FIELDS: {…}})`.
FIELDS = "fields"


def configure_logging(level: str, form: Literal["text", "json"] = "text") -> None:
    """One concise line per event, on stderr. The HTTP server's own news are for debugging."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonLines()
        if form == "json"
        else logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(is_news)


class JsonLines(logging.Formatter):
    """A JSON object a line, whatever line ends its message has."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "message": record.getMessage(),
            "logger": record.name,
        }
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # ASCII: a line must be one whatever its bytes mean


def is_news(record: logging.LogRecord) -> bool:
    """Whether a line of the HTTP server's says what ours do not. An answer that we leave unfinished, because its
    client takes nothing, is no error, and what is no HTTP was refused: each has a line that tells of it."""
    return record.msg not in (
        "ASGI callable returned without completing response.",
        "Invalid HTTP request received.",
    )
