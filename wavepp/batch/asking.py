"""From a question to checked requests of an engine; for batches and for HTTP alike.

Owns no state. A question's prompts become requests together or not at all.
"""

from __future__ import annotations

from pathlib import Path

from wavepp.batch.parse import Question
from wavepp.config import EngineConfig
from wavepp.engine import Engine, Prompt
from wavepp.errors import RequestError
from wavepp.requests import PrefillRequest


def check_model(asked: str | None, config: EngineConfig) -> None:
    """Sees that a question's model is the one that runs; none asked for is fine.

    Raises:
        RequestError: it is another one (code model_not_found).
    """
    names = {config.model_name, config.model, Path(config.model).name}
    if config.served_model_name is not None:
        names = {config.served_model_name}
    if asked is not None and asked not in names:
        raise RequestError(
            f"model {asked!r} is not served here; {config.model_name!r} is",
            code="model_not_found",
            param="model",
        )


async def build_requests(
    engine: Engine, question: Question, request_id: str
) -> list[PrefillRequest]:
    """One checked request a prompt, named after `request_id`; none is submitted yet.

    Raises:
        RequestError: a prompt or an option can't be served.
    """
    if question.chat is not None:
        tokens = await engine.tokenize_chat(question.chat.messages, question.chat.template_options)
        return [await engine.request(tokens, request_id=request_id, **question.options)]
    requests = []
    for place, prompt in enumerate(question.prompts):
        given: Prompt = prompt
        if isinstance(prompt, str):
            given = await engine.tokenize(prompt, add_special_tokens=question.add_special_tokens)
        named = f"{request_id}-{place}"
        requests.append(await engine.request(given, request_id=named, **question.options))
    return requests
