"""The synchronous front end: an Engine on an event loop of its own, in a background thread.

So it works in scripts and inside a running event loop (a notebook) alike. Owns the thread; every
call hands one coroutine over and waits for it. An interrupted call aborts its requests.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from numbers import Integral
from typing import Any, Self, TypeVar, Unpack

from wavepp.config import EngineConfig, build_config
from wavepp.engine import Engine, PrefillOptions, Prompt
from wavepp.errors import EngineDeadError, RequestError
from wavepp.requests import EngineStats, PrefillResults

T = TypeVar("T")
Message = Mapping[str, Any]

GENERATE_TOKENS = 16


class LLM:
    """A pipeline you call and wait for.

        llm = LLM(model="...", pipeline_parallel_size=2)
        for result in llm.prefill(["The capital of France is", [1, 2, 3]]):
            print(result.token_ids)

    Close it (`close()`, or `with LLM(...) as llm:`), or leave that to the interpreter's exit.

    Args:
        model: folder of the checkpoint.
        options: fields of EngineConfig.

    Raises:
        ConfigError: the configuration or checkpoint can't be used.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self._engine = Engine(build_config({"model": model, **options}))
        self._loop: _LoopThread | None = _LoopThread()
        try:
            self._loop.run(self._engine.start())
        except BaseException:
            self.close()
            raise
        _close_at_exit(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        """Closes an engine nobody can reach any more."""
        loop: _LoopThread | None = getattr(self, "_loop", None)
        if loop is None:
            return
        if loop.is_current:  # the collector ran in our own thread, which can't wait for itself
            threading.Thread(target=self.close, name="wavepp-llm-close").start()
        else:
            self.close()

    @property
    def config(self) -> EngineConfig:
        """What the engine was built from."""
        return self._engine.config

    def prefill(
        self, prompts: Prompt | Sequence[Prompt], **options: Unpack[PrefillOptions]
    ) -> PrefillResults:
        """Runs prompts to their first token; one result a prompt, in the order given.

        Args:
            prompts: texts or token ids, mixed as you like; one prompt alone may stand by itself.
            options: see PrefillOptions; the same for all prompts.

        Raises:
            RequestError: a prompt or an option can't be served; then none was run.
            EngineDeadError: the pipeline stopped for good, or this LLM is closed.
        """
        return self._run(self._prefill(_as_prompts(prompts), options))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], **options: Unpack[PrefillOptions]
    ) -> PrefillResults:
        """As `prefill`, and on to the answer's end, or to `max_tokens` (16 if not given)."""
        options.setdefault("max_tokens", GENERATE_TOKENS)
        return self.prefill(prompts, **options)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        **options: Unpack[PrefillOptions],
    ) -> PrefillResults:
        """As `prefill`, for one conversation or several, laid out by the model's chat template.

        Args:
            messages: `{"role": "user", "content": "..."}` and so on; or a list of such lists.
        """
        if not messages:
            raise RequestError("messages is empty", code="empty_prompt", param="messages")
        chats = [messages] if isinstance(messages[0], Mapping) else list(messages)
        return self._run(self._chat(chats, options))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out.

        Raises:
            RequestError: there is no tokenizer, or a token is outside the vocabulary.
        """
        return self._run(self._engine.detokenize(token_ids))

    def stats(self) -> EngineStats:
        """One snapshot of queue, ring and stages."""
        return self._run(self._engine.stats())

    def reset_prefix_cache(self, stage: int | None = None) -> bool:
        """Forgets all cached prefixes, on one stage if said; False when running requests still use
        some of them."""
        return self._run(self._engine.reset_prefix_cache(stage))

    def close(self) -> None:
        """Aborts what is left and gives back every resource. Safe to call twice."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        try:
            loop.run(self._engine.close())
        finally:
            loop.stop()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            coroutine.close()
            raise EngineDeadError("this LLM is closed")
        return self._loop.run(coroutine)

    async def _chat(self, chats: Sequence[Any], options: PrefillOptions) -> PrefillResults:
        return await self._prefill(
            [await self._engine.tokenize_chat(chat) for chat in chats], options
        )

    async def _prefill(self, prompts: Sequence[Prompt], options: PrefillOptions) -> PrefillResults:
        requests = [await self._engine.request(prompt, **options) for prompt in prompts]
        results = await self._engine.submit_all(requests)
        pairs = zip(requests, results, strict=True)
        return PrefillResults([await self._engine.with_text(*pair) for pair in pairs])


class _LoopThread:
    """An event loop that runs in a daemon thread until it is stopped."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="wavepp-llm", daemon=True
        )
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this very thread."""
        return threading.current_thread() is self._thread

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Waits for a coroutine; when the wait is interrupted, until it was cancelled and ended."""
        outcome: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda task: _copy_outcome(task, outcome))

        assert not self.is_current, "an LLM can't wait for itself"
        try:
            self._loop.call_soon_threadsafe(begin)
            return outcome.result()
        except BaseException:
            if not outcome.done():  # the wait itself was interrupted: Ctrl-C
                self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                wait([outcome])
            raise

    def stop(self) -> None:
        """Ends the thread and closes the loop."""
        self.run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _copy_outcome(task: asyncio.Task[T], outcome: Future[T]) -> None:
    if task.cancelled():
        outcome.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one or many; a flat sequence of ints is one prompt."""
    if isinstance(prompts, str) or hasattr(prompts, "tolist"):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts: expected text, token ids or a list of those, not {type(prompts).__name__}",
            param="prompts",
        )
    if prompts and all(isinstance(item, Integral) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _close_at_exit(llm: LLM) -> None:
    """Closes an LLM that was left open, before the interpreter takes its thread pools away."""
    alive = weakref.ref(llm)

    def close() -> None:
        if (left := alive()) is not None:
            left.close()

    # Plain atexit runs after the thread pools refuse work, too late for a clean stop.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(close)
