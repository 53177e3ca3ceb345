"""The OpenAPI document, and a fuzzer that checks the server against it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import PHASES, ServerProcess

#: All checks but `positive_data_acceptance`: a schema cannot say whether a prompt has too many tokens, so requests
#: that match the schema may still be answered 422.
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
]

#: A body with too many items may also have too many bytes or values.
SETTINGS = """\
[checks]
negative_data_rejection.expected-statuses = [400, 404, 413, 415, 422]
"""


def test_every_status_and_the_stream_are_documented(server: ServerProcess) -> None:
    document = server.client.get("/openapi.json").json()
    paths = document["paths"]
    assert set(paths) == {
        "/v1/completions",
        "/openai/v1/completions",
        "/v1/chat/completions",
        "/openai/v1/chat/completions",
        "/v1/responses",
        "/openai/v1/responses",
        "/v1/responses/{response_id}",
        "/openai/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
        "/openai/v1/responses/{response_id}/input_items",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/openai/v1/models",
        "/v1/models/{model}",
        "/openai/v1/models/{model}",
        "/v1/responses/input_tokens",
        "/openai/v1/responses/input_tokens",
        "/apply-template",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
        "/version",
        "/reset_prefix_cache",
        "/telemetry",
    }
    responses = paths["/v1/completions"]["post"]["responses"]
    assert set(responses) == {"200", "400", "404", "408", "413", "415", "422", "500", "503", "504"}
    strict = paths["/openai/v1/completions"]["post"]["responses"]
    assert set(strict) == {"200", "400", "404", "408", "413", "415", "500", "503", "504"}
    assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "Retry-After" in responses["503"]["headers"]
    assert all("x-should-retry" in responses[status]["headers"] for status in ("500", "504"))
    for path in ("/health", "/ready"):
        assert set(paths[path]["get"]["responses"]) == {"200", "503"}
    schemas = document["components"]["schemas"]
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    for path in ("/v1/completions", "/openai/v1/completions"):
        body = paths[path]["post"]["requestBody"]
        assert body["required"]
        assert body["content"]["application/json"]["schema"] == {
            "$ref": "#/components/schemas/CompletionRequest"
        }
    event = responses["200"]["content"]["text/event-stream"]["itemSchema"]["properties"]
    assert event["event"]["enum"] == ["token", "done", "error", "usage"]
    assert len(event["data"]["contentSchema"]["anyOf"]) == 2
    references = re.findall(r'"\$ref": "#/components/schemas/([^"]*)"', json.dumps(document))
    assert set(references) <= set(schemas)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fuzzing_finds_nothing(tmp_path: Path) -> None:
    """The server keeps answers short, even if the fuzzer asks for many tokens."""
    with ServerProcess(PHASES[-1], "--max-seq-len", "192", "--max-waiting-requests", "64") as server:
        command = [
            sys.executable,
            "-m",
            "schemathesis.cli",
            "run",
            f"{server.url}/openapi.json",
            "--no-color",
        ]
        (tmp_path / "schemathesis.toml").write_text(SETTINGS)
        command += ["--checks", ",".join(CHECKS), "--max-examples", "15", "--seed", "1"]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=850, check=False, cwd=tmp_path
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        server.assert_serves()
        assert "Traceback" not in server.log_text
