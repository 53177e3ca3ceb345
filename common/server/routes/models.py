"""Routes that say which model is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from common.server.service import Service, service_of
from common.server.transport import json_response

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The served model."""
    return json_response({"object": "list", "data": [model_card(service_of(request))]})


def model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "infer",
        "max_model_len": service.engine.max_seq_len,
        "phase": service.engine.phase.slug,
    }
