"""Runs a batch: reads lines, keeps a window of them in the engine, writes answers in input order.

Owns the flow; the forms of lines and answers are in parse.py and responses.py, the files and the
rules of taking one up again in files.py. Memory is bounded by the window, not by the input, but for
eight bytes and their place in a set for each custom_id (to notice one that comes twice).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from wavepp.batch.asking import build_requests, check_model
from wavepp.batch.files import (
    PIPE,
    Kept,
    LineReader,
    NumberedLine,
    OutputFile,
    count_lines,
    take_up,
)
from wavepp.batch.parse import Line, Question, parse_line
from wavepp.batch.responses import Answer, Naming, answer_line, error_line
from wavepp.config import EngineConfig
from wavepp.engine import Engine
from wavepp.errors import ConfigError, RequestError
from wavepp.requests import EngineStats


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a run has done so far; lines kept from an earlier run apart."""

    total: int | None = None
    kept: int = 0
    answered: int = 0
    errors: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0

    @property
    def done(self) -> int:
        """Lines that have their answer, in this run or an earlier one."""
        return self.kept + self.answered


class Progress(Protocol):
    """Who is told how a run goes. Called on the event loop; must not block."""

    def update(self, tally: Tally, stats: EngineStats) -> None:
        """Called about twice a second."""
        ...

    def close(self) -> None:
        """The run is over, well or not."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """How a run went: its tally, its seconds, and the engine at its beginning and end."""

    tally: Tally
    wall_s: float
    before: EngineStats | None = None
    after: EngineStats | None = None


class SeenIds:
    """Which custom_ids came before, as 64-bit hashes."""

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def add(self, custom_id: str) -> bool:
        """Takes note of an id; False when it came before."""
        key = xxhash.xxh3_64_intdigest(custom_id.encode("utf-8", "surrogatepass"))
        if key in self._hashes:
            return False
        self._hashes.add(key)
        return True


class BatchRun:
    """One run over one input file. Made before the engine is: nothing is written yet.

    Args:
        source: the input file, "-" for standard input.
        target: the output file, "-" for standard output.
        resume: keep what an earlier run of the same input has answered.

    Raises:
        ConfigError: a file can't be used, or the output doesn't belong to the input.
    """

    def __init__(
        self, config: EngineConfig, source: str, target: str, *, resume: bool = False
    ) -> None:
        if resume and target == PIPE:
            raise ConfigError("--resume needs an output file, not a pipe")
        self.config = config
        self._seen = SeenIds()
        self._reader = LineReader(source)
        if target != PIPE and self._reader.same_file(target):
            raise ConfigError(f"output {target}: is the input file")
        if config.trace is not None:
            _check_trace(config.trace, self._reader, target)
        self._output = OutputFile(target)
        self._output.check()
        kept = take_up(target, self._reader, self._note_seen) if resume else Kept()
        if kept.model not in (None, config.model_name):
            raise ConfigError(
                f"output {target} holds answers of model {kept.model!r}, not "
                f"{config.model_name!r}: start again without --resume"
            )
        self._output.keep = kept.size
        created = kept.created or self._reader.modified_s or int(time.time())
        self._naming = Naming(model=config.model_name, created=created)
        self.tally = Tally(total=count_lines(source), kept=kept.lines, errors=kept.errors)

    def is_finished(self) -> bool:
        """Whether nothing is left to answer, as far as can be said without waiting."""
        return self._reader.is_file and self._reader.peek() is None

    def finish_without_engine(self) -> BatchReport:
        """Drops a torn line, if there is one; for a run with nothing left to answer."""
        assert self.is_finished(), "lines are left to answer"
        self._output.open().close()
        return BatchReport(tally=self.tally, wall_s=0.0)

    def write_to(self, pipe_fd: int) -> None:
        """Says which file descriptor "-" stands for; standard output by default."""
        self._output.pipe_fd = pipe_fd

    async def run(self, engine: Engine, progress: Progress) -> BatchReport:
        """Answers every line that is left. The output is opened, and cut, only now.

        Raises:
            ConfigError: the input or output can't be used.
            EngineDeadError: the pipeline stopped; what is written can be resumed.
        """
        began, before = time.monotonic(), await engine.stats()
        self._output.open()
        watching = asyncio.create_task(self._watch(engine, progress))
        try:
            await self._answer_all(engine)
            after = await engine.stats()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self._output.close()
        wall_s = time.monotonic() - began
        progress.update(self.tally, after)
        return BatchReport(tally=self.tally, wall_s=wall_s, before=before, after=after)

    async def _answer_all(self, engine: Engine) -> None:
        """Two tasks and a queue: one starts answers, the other writes them in the same order."""
        answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(engine.window)
        running: set[asyncio.Task[bytes]] = set()

        async def start() -> None:
            async for number, raw in read_ahead(self._reader):
                task = asyncio.create_task(self._answer(engine, parse_line(number, raw)))
                running.add(task)
                task.add_done_callback(running.discard)
                await answers.put(task)
            await answers.put(None)

        starting = asyncio.create_task(start())
        try:
            while (task := await _next_of(answers, starting)) is not None:
                self._output.write(await task)
                self.tally.answered += 1
            await starting
        finally:
            left = [starting, *running]
            for task_left in left:
                task_left.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _answer(self, engine: Engine, line: Line) -> bytes:
        """One line's answer; what is wrong with it, or with its run, becomes an error record."""
        try:
            question = self._accept(line)
            requests = await build_requests(engine, question, line.line_id)
            results = await engine.submit_all(requests)
        except RequestError as error:
            self.tally.errors += 1
            return error_line(line, error)
        answer = Answer(question=question, requests=requests, results=results)
        if any(result.finish_reason in ("error", "abort") for result in results):
            self.tally.errors += 1
        self.tally.input_tokens += sum(result.num_prompt_tokens for result in results)
        self.tally.cached_tokens += sum(result.num_cached_tokens for result in results)
        return await engine.on_worker(
            lambda: answer_line(line, answer, self._naming, engine.tokenizer)
        )

    def _accept(self, line: Line) -> Question:
        """The line's question, when its id is new and its model is the one that runs."""
        if line.custom_id is not None and not self._seen.add(line.custom_id):
            raise RequestError(
                f"custom_id {line.custom_id!r} came before in this file",
                code="duplicate_custom_id",
                param="custom_id",
            )
        if line.error is not None:
            raise line.error
        assert line.question is not None
        check_model(line.question.model, self.config)
        return line.question

    def _note_seen(self, number: int, raw: bytes) -> None:
        custom_id = parse_line(number, raw).custom_id
        if custom_id is not None:
            self._seen.add(custom_id)

    async def _watch(self, engine: Engine, progress: Progress) -> None:
        while True:
            progress.update(self.tally, await engine.stats())
            await asyncio.sleep(0.5)


def _check_trace(trace: str, reader: LineReader, target: str) -> None:
    """Sees that the trace overwrites neither the input nor the answers."""
    if reader.same_file(trace):
        raise ConfigError(f"trace {trace}: is the input file")
    if target != PIPE and Path(trace).resolve() == Path(target).resolve():
        raise ConfigError(f"trace {trace}: is the output file")


async def _next_of(
    answers: asyncio.Queue[asyncio.Task[bytes] | None], starting: asyncio.Task[None]
) -> asyncio.Task[bytes] | None:
    """The next answer in order; raises what stopped the starter, if something did."""
    getting = asyncio.create_task(answers.get())
    try:
        await asyncio.wait({getting, starting}, return_when=asyncio.FIRST_COMPLETED)
        if not getting.done() and starting.done():
            starting.result()
        return await getting
    finally:
        getting.cancel()


async def read_ahead(reader: LineReader) -> AsyncIterator[NumberedLine]:
    """The reader's lines, read by a daemon thread: a silent pipe can't hold up an exit."""
    loop = asyncio.get_running_loop()
    batches: asyncio.Queue[list[NumberedLine] | BaseException] = asyncio.Queue()
    wanted = threading.Semaphore(2)

    def read() -> None:
        batch: list[NumberedLine] | BaseException = [(0, b"")]
        while batch and not isinstance(batch, BaseException):
            wanted.acquire()
            try:
                batch = reader.next_batch()
            except ConfigError as error:
                batch = error
            try:
                loop.call_soon_threadsafe(batches.put_nowait, batch)
            except RuntimeError:  # the loop is closed: nobody wants them any more
                return

    threading.Thread(target=read, name="wavepp-batch-input", daemon=True).start()
    while batch := await batches.get():
        if isinstance(batch, BaseException):
            raise batch
        for line in batch:
            yield line
        wanted.release()
