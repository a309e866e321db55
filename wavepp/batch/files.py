"""The files of a batch: its input, read line by line, and its output, which can be taken up again.

Owns the promise behind `--resume`: answers are written in order, each as one whole line, so that
whatever a killed run leaves is

    |-- whole lines, the answers of input lines 1..k --|-- at most one torn line --|

The whole lines stay as they are, byte for byte; the torn one is dropped and answered again. Each
answer carries its line's id, made of number and content, so lines of another input are noticed.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from wavepp.batch.parse import ANSWER_START, LINE_BYTES_MAX, answer_start, line_id
from wavepp.errors import ConfigError, WavePPError

PIPE = "-"
READ_BYTES = 1 << 16

NumberedLine = tuple[int, bytes]
"""A line's number (1 is the first of the file) and its bytes, without the line break."""


class LineReader:
    """The lines of a file or pipe that are not blank, with their numbers.

    Raises:
        ConfigError: the input can't be opened or read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = 0 if path == PIPE else os.open(path, os.O_RDONLY)
            self._facts = os.fstat(self._fd)
        except OSError as error:
            raise ConfigError(f"input {path}: {error.strerror}") from None
        if stat.S_ISDIR(self._facts.st_mode):
            raise ConfigError(f"input {path}: is a folder")
        self._pending: list[NumberedLine] = []
        self._batches = self._read()

    @property
    def is_file(self) -> bool:
        """Whether it can be read without waiting for somebody to write."""
        return stat.S_ISREG(self._facts.st_mode)

    @property
    def modified_s(self) -> int | None:
        """When a file was last written, in whole seconds since 1970; None for a pipe."""
        return int(self._facts.st_mtime) if self.is_file else None

    def same_file(self, path: str) -> bool:
        """Whether `path` names this very file."""
        if self.path == PIPE or not os.path.exists(path):
            return False
        return os.path.samestat(self._facts, os.stat(path))

    def next_batch(self) -> list[NumberedLine]:
        """The next lines, as many as one read brings; empty at the end of the input."""
        if self._pending:
            batch, self._pending = self._pending, []
            return batch
        return next(self._batches, [])

    def next_line(self) -> NumberedLine | None:
        """The next line; None at the end of the input."""
        if not self._pending:
            self._pending = self.next_batch()
        return self._pending.pop(0) if self._pending else None

    def peek(self) -> NumberedLine | None:
        """The next line, which stays; None at the end of the input."""
        line = self.next_line()
        if line is not None:
            self._pending.insert(0, line)
        return line

    def close(self) -> None:
        """Closes a file; a pipe is not ours to close."""
        if self.path != PIPE:
            os.close(self._fd)

    def _read(self) -> Iterator[list[NumberedLine]]:
        """Batches of lines. Of a line that is too long only enough is kept to say so."""
        number, pieces, size = 0, list[bytes](), 0
        while chunk := self._read_chunk():
            first, *others = chunk.split(b"\n")
            if size <= LINE_BYTES_MAX:
                pieces.append(first)
                size += len(first)
            if not others:
                continue
            whole = [b"".join(pieces), *others[:-1]]
            pieces, size = [others[-1]], len(others[-1])
            batch = [
                line for place, raw in enumerate(whole, number + 1) if (line := _line(place, raw))
            ]
            number += len(whole)
            if batch:
                yield batch
        if last := _line(number + 1, b"".join(pieces)):
            yield [last]

    def _read_chunk(self) -> bytes:
        try:
            return os.read(self._fd, READ_BYTES)
        except OSError as error:
            raise ConfigError(f"input {self.path}: {error.strerror}") from None


def _line(number: int, raw: bytes) -> NumberedLine | None:
    """A line without its break (and the file without a byte order mark); None when it is blank."""
    if number == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    return (number, raw.removesuffix(b"\r")) if raw.strip() else None


def count_lines(path: str) -> int | None:
    """How many lines of a file are not blank; None for what is not a file."""
    if path == PIPE or not Path(path).is_file():
        return None
    reader, count = LineReader(path), 0
    try:
        while batch := reader.next_batch():
            count += len(batch)
    finally:
        reader.close()
    return count


@dataclass(slots=True, kw_only=True)
class Kept:
    """What an earlier run left that can stay: its whole lines and how many bytes they are."""

    lines: int = 0
    errors: int = 0
    size: int = 0
    model: str | None = None
    created: int | None = None


def take_up(output: str, reader: LineReader, seen: Callable[[int, bytes], object]) -> Kept:
    """Matches an earlier output with the input, which is read on past the lines that are answered.

    Args:
        seen: called with number and bytes of every input line that has its answer.

    Raises:
        ConfigError: the output is not a beginning of this input's answers.
    """
    kept = Kept()
    if not Path(output).exists():
        return kept
    with open(output, "rb") as file:
        for place, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                _check_torn(output, place, raw, reader.peek())
                break
            asked = reader.next_line()
            if asked is None:
                raise ConfigError(
                    f"output {output} has more lines than {reader.path}: it answers another input"
                )
            answer = _read_answer(output, place, raw)
            _match(output, place, answer, asked)
            seen(*asked)
            kept.size += len(raw)
            _note(kept, answer)
    return kept


def _check_torn(output: str, place: int, raw: bytes, asked: NumberedLine | None) -> None:
    """Sees that a last line without its end, which is dropped, is of the answer that was due."""
    due = ANSWER_START if asked is None else answer_start(line_id(*asked))
    size = min(len(raw), len(due))
    if raw[:size] != due[:size]:
        raise ConfigError(
            f"output {output}, line {place}: not the answer that was due there; remove the file, "
            "or run without --resume to overwrite it"
        )


def _read_answer(output: str, place: int, raw: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or not isinstance(answer.get("id"), str):
        raise ConfigError(
            f"output {output}, line {place}: not an answer of run-batch; remove the file, "
            "or run without --resume to overwrite it"
        )
    return answer


def _match(output: str, place: int, answer: dict[str, Any], asked: NumberedLine) -> None:
    if answer["id"] != line_id(*asked):
        raise ConfigError(
            f"output {output}, line {place}: not the answer to line {asked[0]} of the input; "
            "the input changed, so start again without --resume"
        )


def _note(kept: Kept, answer: dict[str, Any]) -> None:
    kept.lines += 1
    if answer.get("error") is not None:
        kept.errors += 1
        return
    body = (answer.get("response") or {}).get("body") or {}
    if kept.model is None:
        kept.model, kept.created = body.get("model"), body.get("created")


@dataclass(slots=True)
class OutputFile:
    """Where answers go, one whole line at a time. Nothing is touched before `open`.

    Args:
        path: a file, or "-" for standard output.
        keep: bytes of an earlier output that stay; what follows them is dropped.
        pipe_fd: what "-" stands for.
    """

    path: str
    keep: int = 0
    pipe_fd: int = 1
    _fd: int = field(default=-1, init=False)

    def check(self) -> None:
        """Sees early that the file can be written.

        Raises:
            ConfigError: it can't.
        """
        if self.path == PIPE:
            return
        place = Path(self.path)
        target = place if place.exists() else place.parent
        if place.is_dir():
            raise ConfigError(f"output {self.path}: is a folder")
        if not target.exists():
            raise ConfigError(f"output {self.path}: folder {target} does not exist")
        if not os.access(target, os.W_OK):
            raise ConfigError(f"output {self.path}: permission denied")

    def open(self) -> Self:
        """Opens the file and cuts it to what is kept.

        Raises:
            ConfigError: it can't be opened, or another run is writing it.
        """
        if self.path == PIPE:
            self._fd = self.pipe_fd
            return self
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            if stat.S_ISREG(os.fstat(self._fd).st_mode):  # devices and pipes may be shared
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(self._fd, self.keep)
                os.lseek(self._fd, self.keep, os.SEEK_SET)
        except BlockingIOError:
            self.close()
            raise ConfigError(f"output {self.path}: another run is writing it") from None
        except OSError as error:
            self.close()
            raise ConfigError(f"output {self.path}: {error.strerror}") from None
        return self

    def write(self, line: bytes) -> None:
        """Writes one whole line; it survives this process from then on.

        Raises:
            WavePPError: the disk is full, or nobody reads the pipe any more.
        """
        assert line.endswith(b"\n"), "an answer is one whole line"
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            raise WavePPError(f"output {self.path}: {error.strerror}") from None

    def close(self) -> None:
        """Closes the file. Safe to call twice."""
        if self.path != PIPE and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
