"""Text to tokens and back: a thin face over a Hugging Face tokenizer read from a folder.

Owns no thread: the engine calls it on one worker thread only, since fast tokenizers can't be used
by several threads at once. Never reaches for the network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wavepp.config import EngineConfig
from wavepp.errors import ConfigError, RequestError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
)
PLAIN_CLASS = "TokenizersBackend"


class Tokenizer:
    """What WavePP needs of a tokenizer; `inner` is the transformers object."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work."""
        return bool(getattr(self._inner, "chat_template", None))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids, with the tokenizer's own leading and trailing ones by default.

        Raises:
            RequestError: the text is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError(
                "prompt is not valid Unicode text", code="bad_text", param="prompt"
            ) from None
        ids = self._inner.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return [int(token_id) for token_id in ids]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The token ids of a conversation laid out by the model's chat template.

        Args:
            messages: `{"role": ..., "content": ...}`, content a string.
            options: handed to the template as they are (add_generation_prompt, tools, ...).

        Raises:
            RequestError: no template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise RequestError(
                "the model has no chat template: use /v1/completions",
                code="no_chat_template",
                param="messages",
            )
        given = {"add_generation_prompt": True, **(options or {})}
        try:
            text = self._inner.apply_chat_template(list(messages), tokenize=False, **given)
        except Exception as error:  # a template is a program of the model's; whatever it raises
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RequestError(
                f"the chat template refuses these messages: {reason}",
                code="chat_template",
                param="messages",
            ) from None
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer; special tokens leave no trace."""
        text = self._inner.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones spelled out."""
        text = self._inner.decode(
            [token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The tokenizer the configuration names, or the model's own; None when there is none.

    Raises:
        ConfigError: a tokenizer was named that is not there, or its files can't be read.
    """
    if config.skip_tokenizer_init:
        return None
    folder = Path(config.tokenizer if config.tokenizer is not None else config.model)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        if config.tokenizer is None:
            return None
        raise ConfigError(f"tokenizer: {folder} holds no tokenizer files")
    try:
        inner = _reader(folder).from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises many kinds for files it can't read
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"tokenizer: {folder} can't be read: {reason}") from None
    return Tokenizer(inner)


def _reader(folder: Path) -> Any:
    """The transformers class that reads this tokenizer.

    AutoTokenizer chooses, but it imports torch, which takes seconds and serves no tokenizer. Where
    the folder says that its tokenizer.json is all there is to it, the choice is known beforehand.
    """
    try:
        said = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        is_plain = said["tokenizer_class"] == PLAIN_CLASS and "auto_map" not in said
    except (OSError, ValueError, TypeError, KeyError):
        is_plain = False  # AutoTokenizer says what is wrong with it
    if is_plain and (folder / "tokenizer.json").is_file():
        from transformers import TokenizersBackend

        return TokenizersBackend
    from transformers import AutoTokenizer

    return AutoTokenizer
