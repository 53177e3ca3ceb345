"""Routes that turn text into token ids, and back."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from common.server.schemas.parsing import parse
from common.server.schemas.tokens import DetokenizeRequest, TokenizeRequest
from common.server.service import service_of
from common.server.transport import json_response

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of a conversation as chat would have it."""
    service = service_of(request)
    wanted = parse(await service.bodies.read_json(request), TokenizeRequest, service.limits)
    tokens, spelled = await service.intake.tokenize(wanted)
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
    """The text of token ids, special tokens included."""
    service = service_of(request)
    wanted = parse(await service.bodies.read_json(request), DetokenizeRequest, service.limits)
    return json_response({"prompt": await service.intake.detokenize(wanted)})
