"""Routes that say which model is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from common.server.schemas.parsing import check_model
from common.server.service import Service, service_of
from common.server.transport import json_response

router = APIRouter()


@router.get("/v1/models")
@router.get("/openai/v1/models")
async def list_models(request: Request) -> Response:
    """The served model."""
    return json_response({"object": "list", "data": [model_card(service_of(request))]})


@router.get("/v1/models/{model:path}")
@router.get("/openai/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> Response:
    """The served model, asked for by its name."""
    service = service_of(request)
    check_model(model, service.limits, status=404)
    return json_response(model_card(service))


def model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "infer",
        "max_model_len": service.engine.max_seq_len,
        "phase": service.engine.phase.slug,
    }
