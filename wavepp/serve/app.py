"""The endpoints: from an HTTP request to a call of the service, and back.

Owns: paths, methods and the OpenAPI document. May not: know Ray, or what an answer looks like.
Bodies are read and checked here rather than by FastAPI, so that all errors are OpenAI's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict

from wavepp import __version__
from wavepp.batch.parse import read_json
from wavepp.batch.schema import ChatBody, CompletionBody
from wavepp.errors import RequestError
from wavepp.serve.asked import GenerateBody, Kind, Streaming, read_fields
from wavepp.serve.gate import KeyGate, read_body
from wavepp.serve.options import MIB, ServeOptions
from wavepp.serve.problems import handle_problems
from wavepp.serve.service import Service, chained

LARGE_BODY = MIB
"""Bodies from here on are parsed on a thread."""

PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}

STOP_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]
}


class TokenizeBody(BaseModel):
    """The body of `/tokenize`: a prompt or messages."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(BaseModel):
    """The body of `/detokenize`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = None
    tokens: list[int]


class AbortBody(BaseModel):
    """The body of `/abort_requests`: answers by the ids that clients got."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    request_ids: list[str]


def build_app(service: Service, options: ServeOptions) -> FastAPI:
    """The application of one server."""
    app = FastAPI(title="WavePP", version=__version__)
    app.add_middleware(KeyGate, api_key=options.api_key)
    handle_problems(app)
    app.include_router(_answers(service, options))
    app.include_router(_tokens(service, options))
    app.include_router(_operations(service, options))
    return app


def _answers(service: Service, options: ServeOptions) -> APIRouter:
    router = APIRouter()

    async def answer(kind: Kind, request: Request) -> Response:
        fields = await _fields(request, options)
        given_id = request.headers.get("x-request-id") or _text(fields.get("request_id"))
        asked = await service.ask(kind, fields, given_id)
        headers = {"X-Request-Id": asked.answer_id}
        if asked.stream is None:
            status, body = await service.answer(asked)
            return Response(body, status, headers, "application/json")
        events = service.events(asked)
        first = await anext(events)  # a refusal still has a status of its own
        return StreamingResponse(chained(first, events), 200, headers, "text/event-stream")

    @router.post(
        "/v1/completions",
        openapi_extra=_body(CompletionBody, prompt=PROMPT_SCHEMA, stop=STOP_SCHEMA),
    )
    async def completions(request: Request) -> Response:
        """OpenAI's completions."""
        return await answer("completion", request)

    @router.post("/v1/chat/completions", openapi_extra=_body(ChatBody, stop=STOP_SCHEMA))
    async def chat_completions(request: Request) -> Response:
        """OpenAI's chat completions; the model needs a chat template."""
        return await answer("chat", request)

    @router.post("/inference/v1/generate", openapi_extra=_body(GenerateBody))
    async def generate(request: Request) -> Response:
        """Tokens in, tokens out."""
        return await answer("generate", request)

    return router


def _tokens(service: Service, options: ServeOptions) -> APIRouter:
    router = APIRouter()
    engine = service.engine

    @router.post("/tokenize", openapi_extra=_body(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text or a conversation."""
        body = read_fields(TokenizeBody, await _fields(request, options))
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give one of prompt and messages", param="prompt")
        if body.prompt is not None:
            tokens = await engine.tokenize(body.prompt, add_special_tokens=body.add_special_tokens)
        else:
            given = {"add_generation_prompt": body.add_generation_prompt}
            tokens = await engine.tokenize_chat(body.messages or [], given)
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": service.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        }
        if body.return_token_strs:
            tokenizer = engine.tokenizer
            assert tokenizer is not None, "it has just tokenised"
            answer["token_strs"] = await engine.on_worker(
                lambda: [tokenizer.token_text(token_id) for token_id in tokens]
            )
        return JSONResponse(answer)

    @router.post("/detokenize", openapi_extra=_body(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = read_fields(DetokenizeBody, await _fields(request, options))
        return JSONResponse({"prompt": await engine.detokenize(body.tokens)})

    return router


def _operations(service: Service, options: ServeOptions) -> APIRouter:
    router = APIRouter()

    async def health() -> Response:
        """Whether the engine lives and makes progress; answered without asking it."""
        problem = service.health.problem
        if problem is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failed", "reason": problem}, status_code=503)

    for path in ("/health", "/ready", "/ping"):
        router.add_api_route(path, health, methods=["GET"], name=path[1:])

    @router.get("/v1/models")
    async def models() -> Response:
        """The one model."""
        return JSONResponse(service.models())

    @router.get("/version")
    async def version() -> Response:
        """Of WavePP."""
        return JSONResponse({"version": __version__})

    @router.get("/load")
    async def load() -> Response:
        """Answers in flight."""
        return JSONResponse({"server_load": service.load})

    @router.get("/server_info")
    async def server_info() -> Response:
        """Configuration and stages."""
        return JSONResponse(service.server_info())

    @router.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(await service.metrics_text(), media_type=CONTENT_TYPE_LATEST)

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        """Forgets cached prefixes that no request uses."""
        return JSONResponse({"reset": await service.engine.reset_prefix_cache()})

    @router.post("/abort_requests", openapi_extra=_body(AbortBody))
    async def abort_requests(request: Request) -> Response:
        """Aborts answers in flight."""
        body = read_fields(AbortBody, await _fields(request, options))
        return JSONResponse({"aborted": await service.abort(body.request_ids)})

    return router


async def _fields(request: Request, options: ServeOptions) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        ApiError, RequestError: it is too large, or none.
    """
    raw = await read_body(request, options.body_bytes_max)
    if len(raw) < LARGE_BODY:
        return read_json(raw)
    return await asyncio.to_thread(read_json, raw)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _body(kind: type[BaseModel], **changed: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the OpenAPI document that says what a body may be."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    schema["properties"] |= {name: dict(value) for name, value in changed.items()}
    if kind in (CompletionBody, ChatBody, GenerateBody):
        more = Streaming.model_json_schema()
        schema["properties"] |= json.loads(
            json.dumps(more["properties"]).replace(
                '{"$ref": "#/$defs/StreamOptions"}', json.dumps(more["$defs"]["StreamOptions"])
            )
        )
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
