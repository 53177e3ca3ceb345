"""A proxy between a coding agent and a server: forces the first call, and bounds answers.

The bundled models call no tools by themselves, and agents leave the choice to the model. So the proxy writes into
the first request that has tools that one of them must be called. Everything else passes through as it is.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import httpx

HOP_BY_HOP = {"connection", "content-length", "host", "transfer-encoding"}


class ForcingProxy:
    """Listens on a free port of this machine and forwards to `url`.

    Args:
        url: the server's address.
        tool: name of the tool that the first request with tools must call.
        max_tokens: most new tokens of each answer: a tiny model may not find its end behind a long prompt.

    Attributes:
        url: the proxy's address.
        bodies: the bodies of all requests that had tools, as the agent sent them.
        statuses: the statuses of all answers.
    """

    def __init__(self, url: str, tool: str, max_tokens: int) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                content = self.rfile.read(int(self.headers.get("content-length") or 0))
                if content:
                    content = json.dumps(
                        proxy.changed(self.path, json.loads(content), tool, max_tokens)
                    ).encode()
                headers = {
                    name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP
                }
                with httpx.stream(
                    self.command, url + self.path, content=content, headers=headers, timeout=None
                ) as answer:
                    proxy.statuses.append(answer.status_code)
                    self.send_response(answer.status_code)
                    self.send_header("Content-Type", answer.headers.get("content-type", "application/json"))
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    for piece in answer.iter_bytes():
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                        self.wfile.flush()
                    self.wfile.write(b"0\r\n\r\n")

            do_GET = do_POST = do_HEAD = forward

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def changed(self, path: str, body: dict[str, Any], tool: str, max_tokens: int) -> dict[str, Any]:
        """Return a body with bounded answers and, if it is the first that has tools, with a call that is forced."""
        responses, messages = "/responses" in path, "/messages" in path
        if not path.partition("?")[0].endswith("count_tokens"):
            body = body | {"max_output_tokens" if responses else "max_tokens": max_tokens}
        if not body.get("tools"):
            return body
        first = not self.bodies
        self.bodies.append(body)
        if not first:
            return body
        named: dict[str, Any] = {"type": "function", "function": {"name": tool}}
        if responses:
            named = {"type": "function", "name": tool}
        if messages:
            named = {"type": "tool", "name": tool}
        return body | {"tool_choice": named}

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
