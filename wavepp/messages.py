"""Messages of a conversation, as chat templates want them: with plain text.

Owns: which forms of OpenAI's messages are taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wavepp.errors import RequestError
from wavepp.validation import shown


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, each with its content as one string (text parts are joined by line breaks).

    Raises:
        RequestError: a message is none, or holds something that is not text.
    """
    return [_plain(number, message) for number, message in enumerate(messages)]


def _plain(number: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its content as one string (text parts are joined by line breaks)."""
    where = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: expected a message", param="messages")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{where}.role: expected text", param="messages")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise RequestError(f"{where}.content: expected text or text parts", param="messages")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestError(
                f"{where}.content: only text parts are supported (got {shown(part)})",
                code="unsupported",
                param="messages",
            )
        texts.append(text)
    return {**message, "content": "\n".join(texts)}
