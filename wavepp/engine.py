"""The asynchronous front end: checks and tokenises prompts, and hands them to a running pipeline.

Owns the backend's lifetime, the tokenizer's worker thread and the ids now in use. Knows nothing of
stages, waves or Ray; what it runs on is an `EngineBackend`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Self, TypedDict, TypeVar, Unpack

from wavepp.actors.factories import torch_executor
from wavepp.actors.ports import EngineBackend, ExecutorFactory
from wavepp.actors.wave_times import read_wave_times
from wavepp.config import EngineConfig
from wavepp.control.work import StageFacts
from wavepp.errors import ConfigError, EngineDeadError, QueueFullError, RequestError
from wavepp.messages import plain_messages
from wavepp.requests import (
    EngineStats,
    Increment,
    PrefillRequest,
    PrefillResult,
    check_request,
    make_request,
)
from wavepp.text_stream import StreamedAnswer, no_text
from wavepp.tokenizer import Tokenizer, load_tokenizer
from wavepp.validation import shown

T = TypeVar("T")
Prompt = str | Sequence[int]
"""Text, or token ids (any sequence of ints, or an array of them)."""

NONE_IS_DEFAULT = ("cache_salt", "stop", "stop_token_ids")
WINDOW_MIN = 64
RETRY_S = 0.05


class PrefillOptions(TypedDict, total=False):
    """What a prefill may be asked for; see PrefillRequest for each."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    cache_salt: str | None


class Engine:
    """A pipeline with a tokenizer, for one event loop.

        async with Engine(EngineConfig(model="...", pipeline_parallel_size=2)) as engine:
            result = await engine.prefill("The capital of France is")

    Args:
        config: what to build; or name its fields as keyword arguments.
        backend: a pipeline to run on; by default the one of `config.transport`.

    Raises:
        ConfigError: the configuration can't be used.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        backend: EngineBackend | None = None,
        **options: Any,
    ) -> None:
        if config is not None and options:
            raise ConfigError(f"give a config or keyword arguments, not both: {sorted(options)}")
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(
                f"config: expected an EngineConfig, a folder is named by model=... "
                f"(got {shown(config)})"
            )
        self.config = config if config is not None else EngineConfig(**options)
        self._given_backend = backend
        self._backend: EngineBackend | None = None
        self._facts: tuple[StageFacts, ...] = ()
        self._tokenizer: Tokenizer | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._live: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Builds the pipeline and loads the tokenizer; returns when requests can run.

        Raises:
            ConfigError: the configuration or checkpoint can't be used.
        """
        if self._backend is not None:
            raise RuntimeError("the engine was started before; make a new one")
        check_folder(self.config)
        backend = self._given_backend or build_backend(self.config)
        worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wavepp-tokenizer")
        self._backend, self._worker = backend, worker
        self._loop = loop = asyncio.get_running_loop()
        loading = loop.run_in_executor(worker, load_tokenizer, self.config)
        try:
            self._facts = await backend.start()
            self._tokenizer = await loading
        except BaseException:
            await asyncio.gather(loading, return_exceptions=True)
            await self.close()
            raise

    async def close(self) -> None:
        """Aborts what is left and gives back every resource. Safe to call twice."""
        worker, self._worker = self._worker, None
        if self._backend is not None:
            await self._backend.close()
        if worker is not None:
            worker.shutdown(wait=False, cancel_futures=True)

    async def prefill(
        self, prompt: Prompt, *, request_id: str | None = None, **options: Unpack[PrefillOptions]
    ) -> PrefillResult:
        """Runs one prompt to its first token, or on to `max_tokens`. Cancelling the awaiting task
        aborts the request.

        Raises:
            RequestError: the prompt or an option can't be served; nothing was queued.
            QueueFullError: the queue limits are reached; try again later.
            EngineDeadError: the pipeline stopped for good, or the engine is closed.
        """
        request = await self.request(prompt, request_id=request_id, **options)
        return await self.with_text(request, await self.submit(request))

    async def request(
        self, prompt: Prompt, *, request_id: str | None = None, **options: Unpack[PrefillOptions]
    ) -> PrefillRequest:
        """The checked request for a prompt, not yet submitted; text is tokenised on a thread.

        Raises:
            RequestError: as `prefill`.
        """
        facts = self._running_facts()
        tokens = await self.tokenize(prompt) if isinstance(prompt, str) else prompt
        fields: dict[str, Any] = {**options, "prompt_token_ids": tokens}
        for name in NONE_IS_DEFAULT:
            if fields.get(name, "") is None:
                del fields[name]
        fields["request_id"] = request_id if request_id is not None else uuid.uuid4().hex
        request = make_request(**fields)
        _check(request, facts, self._tokenizer)
        return request

    async def submit(self, request: PrefillRequest) -> PrefillResult:
        """Runs a request to its end; as `prefill`, but with text only where it asks for stop
        strings."""
        if not request.stop:
            return await self._submit(request, stream=False)
        result: PrefillResult | None = None
        async with aclosing(self.stream_request(request)) as steps:
            async for step in steps:
                result = step.result
        assert result is not None, "a stream ends with its result"
        return result

    async def with_text(self, request: PrefillRequest, result: PrefillResult) -> PrefillResult:
        """A result as `prefill` gives it: with its text, if several tokens were asked for and there
        is a tokenizer. Those who lay answers out themselves need none."""
        tokenizer = self._tokenizer
        is_wanted = request.max_tokens > 1 and result.token_ids and result.text is None
        if tokenizer is None or not is_wanted:
            return result
        text = await self.on_worker(lambda: tokenizer.decode(result.token_ids))
        return replace(result, text=text)

    async def stream(
        self, prompt: Prompt, *, request_id: str | None = None, **options: Unpack[PrefillOptions]
    ) -> AsyncIterator[Increment]:
        """As `prefill`, but tells each token as it is produced; the last increment has the result.
        Closing the iterator (`contextlib.aclosing`) aborts the request.
        """
        request = await self.request(prompt, request_id=request_id, **options)
        async with aclosing(self.stream_request(request)) as steps:
            async for step in steps:
                yield step

    async def stream_request(self, request: PrefillRequest) -> AsyncGenerator[Increment]:
        """Streams a request; as `stream`."""
        _check(request, self._running_facts(), self._tokenizer)
        assert self._backend is not None
        decode = self._tokenizer.decode if self._tokenizer is not None else no_text
        answer = StreamedAnswer(request, decode)
        running = asyncio.create_task(self._submit(request, stream=True))
        try:
            await asyncio.sleep(0)  # it is submitted before anybody asks for more of it
            while more := await self._backend.more(request.request_id, answer.num_told):
                yield await self.on_worker(partial(answer.grow, more))
                if answer.is_stopped:
                    break
            if answer.is_stopped and request.prompt_logprobs is None:
                await self._backend.abort(request.request_id)
            result = await running
            yield await self.on_worker(partial(answer.end, result))
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _submit(self, request: PrefillRequest, *, stream: bool) -> PrefillResult:
        facts = self._running_facts()
        _check(request, facts, self._tokenizer)
        if request.request_id in self._live:
            raise RequestError(
                f"request_id {request.request_id!r} is in use by another request",
                code="duplicate_request_id",
                param="request_id",
            )
        assert self._backend is not None
        self._live.add(request.request_id)
        try:
            return await self._backend.submit(request, stream=stream)
        finally:
            self._live.discard(request.request_id)

    async def submit_all(self, requests: Sequence[PrefillRequest]) -> list[PrefillResult]:
        """Runs several requests, `window` at a time at most, and returns their results in order.

        A full queue is waited for, while others are in the engine. When one fails the others are
        aborted.

        Raises:
            RequestError, EngineDeadError: as `prefill`.
        """
        room = asyncio.Semaphore(self.window)

        async def run(request: PrefillRequest) -> PrefillResult:
            async with room:
                return await self._submit_when_room(request)

        return await all_or_none([run(request) for request in requests])

    async def abort(self, request_id: str) -> bool:
        """Aborts a request in any state: its prefill returns finish_reason "abort".

        Returns:
            False when no request of that id is in the engine.
        """
        self._running_facts()
        assert self._backend is not None
        return await self._backend.abort(request_id)

    async def stats(self) -> EngineStats:
        """One snapshot of queue, ring and stages."""
        self._running_facts()
        assert self._backend is not None
        return await self._backend.stats()

    async def check_health(self) -> None:
        """Returns when the pipeline lives and makes progress.

        Raises:
            EngineDeadError: it does not, and why.
        """
        self._running_facts()
        assert self._backend is not None
        await self._backend.check_health()

    async def reset_prefix_cache(self, stage: int | None = None) -> bool:
        """Forgets all cached prefixes that no request uses, on every stage or on one.

        Returns:
            False when some are in use by running requests; those stay.

        Raises:
            RequestError: there is no such stage.
        """
        stages = len(self._running_facts())
        if stage is not None and not (isinstance(stage, int) and 0 <= stage < stages):
            raise RequestError(
                f"stage {stage!r}: the pipeline has stages 0 to {stages - 1}",
                code="unknown_stage",
                param="stage",
            )
        assert self._backend is not None
        return await self._backend.reset_prefix_cache(stage)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text.

        Raises:
            RequestError: there is no tokenizer, or the text is empty or not Unicode.
        """
        if not isinstance(text, str):
            raise RequestError(f"prompt: expected text, not {type(text).__name__}", param="prompt")
        if not text:
            raise RequestError("prompt is empty", code="empty_prompt", param="prompt")
        encoder = self._need_tokenizer()
        return await self.on_worker(
            lambda: encoder.encode(text, add_special_tokens=add_special_tokens)
        )

    async def tokenize_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The token ids of a conversation; options go to the model's chat template.

        Raises:
            RequestError: there is no tokenizer or no template, or it refuses the messages.
        """
        encoder = self._need_tokenizer()
        plain = plain_messages(messages)
        return await self.on_worker(lambda: encoder.encode_chat(plain, options))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out.

        Raises:
            RequestError: there is no tokenizer, or a token is outside the vocabulary.
        """
        decoder = self._need_tokenizer()
        if not all(isinstance(token, Integral) for token in token_ids):
            raise RequestError("tokens: expected token ids", code="bad_token", param="tokens")
        vocab_size = min(stage.vocab_size for stage in self._facts)
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"token id {token_id} is outside the vocabulary of {vocab_size} tokens",
                    code="bad_token",
                    param="tokens",
                )
        return await self.on_worker(lambda: decoder.decode(token_ids))

    async def on_worker(self, call: Callable[[], T]) -> T:
        """Runs what uses the tokenizer on the tokenizer's thread."""
        if self._worker is None:
            raise EngineDeadError("the engine is closed")
        return await asyncio.get_running_loop().run_in_executor(self._worker, call)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, for use on `on_worker` only; None: token ids only."""
        return self._tokenizer

    @property
    def facts(self) -> tuple[StageFacts, ...]:
        """What the stages said of themselves when they started."""
        return self._facts

    @property
    def window(self) -> int:
        """How many requests to keep in the engine so that its queue is never empty."""
        wanted = max(WINDOW_MIN, 2 * self.config.max_num_seqs)
        limit = self.config.max_num_queued_reqs
        return wanted if limit is None else min(wanted, limit)

    async def _submit_when_room(self, request: PrefillRequest) -> PrefillResult:
        while True:
            try:
                return await self.submit(request)
            except QueueFullError:
                if not self._live:
                    raise
                await asyncio.sleep(RETRY_S)

    def _running_facts(self) -> tuple[StageFacts, ...]:
        if not self._facts:
            raise RuntimeError("the engine is not started: use `async with` or await start()")
        if self._worker is None:
            raise EngineDeadError("the engine is closed")
        if self._loop is not None and self._loop.is_closed():
            raise EngineDeadError(
                "the event loop that this engine was started in is closed: use it in one "
                "asyncio.run, or LLM without asyncio"
            )
        return self._facts

    def _need_tokenizer(self) -> Tokenizer:
        self._running_facts()
        if self._tokenizer is None:
            raise RequestError(
                "there is no tokenizer (none in the checkpoint, or skip_tokenizer_init): "
                "give token ids",
                code="no_tokenizer",
                param="prompt",
            )
        return self._tokenizer


async def all_or_none(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs them together; when one fails the others are cancelled, and have ended."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def build_backend(config: EngineConfig) -> EngineBackend:
    """The pipeline of `config.transport`, not yet started."""
    factory = _executor_factory(config)
    if config.transport == "local":
        from wavepp.actors.local import LocalPipeline

        return LocalPipeline(config, factory)
    from wavepp.actors.ray.launch import RayPipeline

    return RayPipeline(config, factory)


def _executor_factory(config: EngineConfig) -> ExecutorFactory:
    if config.device == "emulated":
        from wavepp.emulated.executor import emulated_executor

        return emulated_executor
    return torch_executor


def check_folder(config: EngineConfig) -> None:
    """Sees that the checkpoint's folder is there before anything heavy is started.

    Raises:
        ConfigError: it isn't, or holds no config.json; or there is no such cost model; or the file
            of wave times can't be used.
    """
    read_wave_times(config)
    if config.device == "emulated":
        from wavepp.emulated.cost_model import load_cost_model

        assert config.cost_model is not None, "the configuration sees to it"
        load_cost_model(config.cost_model)
        return
    folder = Path(config.model)
    if not folder.is_dir():
        raise ConfigError(f"model: {config.model} is not a folder")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model: {config.model} holds no config.json")


def _check(
    request: PrefillRequest, facts: tuple[StageFacts, ...], tokenizer: Tokenizer | None
) -> None:
    if request.stop and tokenizer is None:
        raise RequestError(
            "stop needs a tokenizer: name stop_token_ids", code="no_tokenizer", param="stop"
        )
    check_request(
        request,
        vocab_size=min(stage.vocab_size for stage in facts),
        max_model_len=min(stage.max_model_len for stage in facts),
    )
