"""Routes that convert text to token ids, and back."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from common.server.requests.chat import DetokenizeRequest, TokenizeRequest
from common.server.service import service_of
from common.server.transport import json_response, while_connected

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Return the token ids of a text, or of a conversation as chat renders it."""
    service = service_of(request)
    intake = service.intake
    body = await service.bodies.read_json(request)

    async def convert() -> tuple[list[int], list[str] | None]:
        return await intake.tokenize(await intake.parse(body, TokenizeRequest))

    tokens, spelled = await while_connected(request.receive, convert())
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": service.engine.max_seq_len,
            "tokens": tokens,
            "token_strs": spelled,
        }
    )


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """Return the text of token ids, special tokens included."""
    service = service_of(request)
    intake = service.intake
    body = await service.bodies.read_json(request)

    async def convert() -> str:
        return await intake.detokenize(await intake.parse(body, DetokenizeRequest))

    return json_response({"prompt": await while_connected(request.receive, convert())})
