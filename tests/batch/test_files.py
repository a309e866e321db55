"""Input lines however they are cut into reads, and outputs that are taken up again."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wavepp.batch import files
from wavepp.batch.files import LineReader, OutputFile, count_lines, take_up
from wavepp.batch.parse import line_id
from wavepp.errors import ConfigError, WavePPError

LINES = [(1, b"one"), (2, b"two")]


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(files, "READ_BYTES", 3)
    return


def read_all(reader: LineReader) -> list[tuple[int, bytes]]:
    lines = []
    while (line := reader.next_line()) is not None:
        lines.append(line)
    reader.close()
    return lines


@pytest.mark.usefixtures("small_reads")
@given(content=st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r\n", b" "]), max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_do_not_depend_on_how_they_are_read(tmp_path: Path, content: list[bytes]) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"".join(content))
    expected = [
        (number, line.removesuffix(b"\r"))
        for number, line in enumerate(b"".join(content).split(b"\n"), start=1)
        if line.strip()
    ]
    assert read_all(LineReader(str(path))) == expected
    assert count_lines(str(path)) == len(expected)


def test_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n")
    assert read_all(LineReader(str(path))) == [(1, b"a"), (2, b"\xef\xbb\xbfb")]


def test_endless_line_is_cut_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LINE_BYTES_MAX", 100)
    monkeypatch.setattr(files, "READ_BYTES", 64)
    path = tmp_path / "in"
    path.write_bytes(b"x" * 10_000 + b"\nafter\n")
    (number, long), after = read_all(LineReader(str(path)))
    assert (number, after) == (1, (2, b"after"))
    assert 100 < len(long) < 300


def test_peek_takes_nothing_away(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"a\nb\n")
    reader = LineReader(str(path))
    assert reader.peek() == reader.peek() == (1, b"a")
    assert reader.next_batch() == [(1, b"a"), (2, b"b")]
    assert reader.peek() is None


def test_pipe_gives_lines_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    said = threading.Event()

    def talk() -> None:
        with open(path, "wb", buffering=0) as pipe:
            pipe.write(b"one\ntw")
            assert said.wait(10)
            pipe.write(b"o\n")

    talker = threading.Thread(target=talk)
    talker.start()
    reader = LineReader(str(path))
    assert not reader.is_file
    assert reader.next_line() == (1, b"one")
    said.set()
    assert reader.next_line() == (2, b"two")
    assert reader.next_line() is None
    talker.join()
    reader.close()
    assert count_lines(str(path)) is None


def test_inputs_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="input nowhere: No such file"):
        LineReader("nowhere")
    with pytest.raises(ConfigError, match="is a folder"):
        LineReader(str(tmp_path))


def test_outputs_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        OutputFile(str(tmp_path)).check()
    with pytest.raises(ConfigError, match="does not exist"):
        OutputFile(str(tmp_path / "no" / "out")).check()
    with pytest.raises(WavePPError, match="No space left"):
        OutputFile("/dev/full").open().write(b"x\n")


def test_output_is_cut_to_what_is_kept_and_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"kept\ntorn")
    output = OutputFile(str(path), keep=5).open()
    with pytest.raises(ConfigError, match="another run is writing it"):
        OutputFile(str(path)).open()
    output.write(b"new\n")
    output.close()
    output.close()
    assert path.read_bytes() == b"kept\nnew\n"
    OutputFile(str(path)).open().close()
    assert path.read_bytes() == b""


def test_devices_and_pipes_are_shared(tmp_path: Path) -> None:
    for path in ("/dev/null", "/dev/full"):
        first, second = OutputFile(path).open(), OutputFile(path).open()
        first.close()
        second.close()


@pytest.mark.parametrize("kept", [0, 1])
@given(size=st.integers(min_value=1, max_value=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_only_a_torn_answer_is_dropped(tmp_path: Path, kept: int, size: int) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"one\ntwo\n")
    answers = [f'{{"id": "{line_id(n, raw)}", "error": 1}}'.encode() for n, raw in LINES]
    whole = b"".join(answer + b"\n" for answer in answers[:kept])
    output.write_bytes(whole + answers[kept][:size])
    assert take_up(str(output), LineReader(str(source)), lambda *_: None).size == len(whole)
    output.write_bytes(whole + b"my precious notes, with no line break"[:size])
    with pytest.raises(ConfigError, match=f"line {kept + 1}: not the answer"):
        take_up(str(output), LineReader(str(source)), lambda *_: None)


def test_torn_line_behind_the_last_answer_is_not_ours(tmp_path: Path) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"")
    output.write_bytes(b"notes")
    with pytest.raises(ConfigError, match="line 1: not the answer"):
        take_up(str(output), LineReader(str(source)), lambda *_: None)
