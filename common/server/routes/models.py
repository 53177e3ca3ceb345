"""Routes that say which model is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from common.server.bodies import check_model
from common.server.service import Service, service_of
from common.server.transport import json_response

router = APIRouter()


@router.get("/v1/models")
@router.get("/openai/v1/models")
async def list_models(request: Request) -> Response:
    """The served model."""
    return json_response({"object": "list", "data": model_cards(service_of(request))})


@router.get("/v1/models/{model:path}")
@router.get("/openai/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> Response:
    """The served model, asked for by its name."""
    service = service_of(request)
    check_model(model, service.limits)
    (card,) = (each for each in model_cards(service) if each["id"] == model)
    return json_response(card)


def model_cards(service: Service) -> list[dict[str, Any]]:
    """The served model, by each of its names."""
    card = {
        "object": "model",
        "created": service.created,
        "owned_by": "infer",
        "max_model_len": service.engine.max_seq_len,
        "phase": service.engine.phase.slug,
    }
    return [{"id": name} | card for name in service.limits.models]
