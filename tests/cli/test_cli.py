"""The `wavepp` command as people run it: help, flags, mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import wavepp
from wavepp.commands.engine_flags import engine_command
from wavepp.config import EngineConfig
from wavepp.errors import ConfigError

WAVEPP = [sys.executable, "-m", "wavepp.cli"]


def wavepp_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(
        [*WAVEPP, *arguments], capture_output=True, text=True, timeout=120, check=False, env=env
    )


def test_version_and_help() -> None:
    assert wavepp_cli("--version").stdout == f"wavepp {wavepp.__version__}\n"
    shown = wavepp_cli("--help")
    assert shown.returncode == 0
    commands = [line.split()[0] for line in shown.stdout.split("Commands:")[1].splitlines() if line]
    assert commands == [
        *("run-batch", "serve", "top", "sim", "make-tiny", "check-model", "plan", "trace", "bench"),
    ]


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_no_command_shows_the_help_and_is_wrong_usage(arguments: list[str]) -> None:
    shown = wavepp_cli(*arguments)
    assert shown.returncode == 2
    assert "Commands:" in shown.stderr


@pytest.mark.parametrize("command", [["run-batch"], ["bench", "throughput"]])
def test_help_has_a_flag_for_every_field(command: list[str]) -> None:
    text = wavepp_cli(*command, "--help").stdout
    for name in EngineConfig.model_fields:
        assert f"--{name.replace('_', '-')}" in text
    assert "-pp, --pipeline-parallel-size" in text
    assert "--enable-prefix-caching / --no-enable-prefix-caching" in text
    assert "--config FILE.yaml" in text


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from wavepp.cli import _status; sys.argv = ['wavepp', 'run-batch', '--help']; "
        "_status(); print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


MISTAKES: list[tuple[list[str], str]] = [
    (["run-batc"], "No such command 'run-batc'"),
    (["run-batch"], "Missing option '--input-file'"),
    (["run-batch", "-i", "x", "-o", "y"], "model is required"),
    (["run-batch", "-i", "x", "-o", "y", "--model", "nowhere"], "nowhere is not a folder"),
    (["run-batch", "-i", "x", "-o", "y", "--modle", "m"], "No such option"),
    (["run-batch", "-i", "x", "-o", "y", "--model", "m", "-pp", "two"], "'-pp'"),
    (["run-batch", "-i", "x", "-o", "y", "--model", "m", "-pp", "0"], "pipeline_parallel_size: "),
    (["run-batch", "-i", "x", "-o", "y", "--model", "m", "--dtype", "int8"], "dtype: "),
    (["run-batch", "-i", "x", "-o", "y", "--config", "none.yaml"], "none.yaml: No such file"),
    (["bench", "throughput", "--model", "m", "--workload", "colt"], "did you mean 'cold'?"),
    (["bench", "throughput", "--model", "m", "--concurrency", "1,0"], "such as 1,4,8"),
    (["bench", "throughput", "--model", "m", "--baseline", "vllm"], "not one of transformers"),
    (["bench", "throughput", "--model", "m", "--prompt-len", "0"], "--prompt-len"),
    (["bench", "compare", "none.json", "none.json"], "none.json: No such file"),
    (["make-tiny", "lama", "out"], "'lama' is not known"),
    (["check-model", "nowhere"], "nowhere is not a folder"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_are_one_line_and_status_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = wavepp_cli(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("wavepp: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def seen_configs(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """What a command with engine flags gets, in place of running it."""
    seen: list[EngineConfig] = []
    monkeypatch.setattr(
        "wavepp.commands.run_batch.run", lambda config, *_, **__: seen.append(config)
    )
    return seen


def parsed(monkeypatch: pytest.MonkeyPatch, seen: list[EngineConfig], *flags: str) -> EngineConfig:
    from wavepp import cli

    monkeypatch.setattr(sys, "argv", ["wavepp", "run-batch", "-i", "i", "-o", "o", *flags])
    assert cli._status() == 0
    return seen.pop()


def test_flags_become_the_config(
    monkeypatch: pytest.MonkeyPatch, seen_configs: list[EngineConfig]
) -> None:
    flags = "--model m -pp 2 --layer-partition 5,3 --no-enable-prefix-caching --watchdog-s 2.5 "
    flags += "--block-size 16 --dtype float32 --skip-tokenizer-init"
    assert parsed(monkeypatch, seen_configs, *flags.split()) == EngineConfig(
        model="m",
        pipeline_parallel_size=2,
        layer_partition=(5, 3),
        enable_prefix_caching=False,
        watchdog_s=2.5,
        block_size=16,
        dtype="float32",
        skip_tokenizer_init=True,
    )


def test_flags_win_over_the_yaml_file(
    monkeypatch: pytest.MonkeyPatch, seen_configs: list[EngineConfig], tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: y\nblock-size: 16\nenable-prefix-caching: false\n")
    flags = ["--config", str(file), "--block-size", "32"]
    assert parsed(monkeypatch, seen_configs, *flags) == EngineConfig(
        model="y", block_size=32, enable_prefix_caching=False
    )


def test_unknown_yaml_key_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: m\nblock-sise: 16\n")
    done = wavepp_cli("run-batch", "-i", "x", "-o", "y", "--config", str(tmp_path / "c.yaml"))
    assert done.returncode == 2
    assert done.stderr == "wavepp: unknown option 'block_sise'; did you mean 'block_size'?\n"


def test_a_field_no_flag_can_be_made_of_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    field = EngineConfig.model_fields["seed"]
    monkeypatch.setattr(field, "annotation", dict[str, int])

    def command(config: EngineConfig) -> None:
        pass

    with pytest.raises(ConfigError, match="seed: no flag can be made of"):
        engine_command(command)


def test_make_tiny_and_check_model(tmp_path: Path) -> None:
    made = wavepp_cli("make-tiny", "qwen2", str(tmp_path / "m"))
    assert (made.returncode, made.stdout) == (0, "")
    shown = wavepp_cli("check-model", str(tmp_path / "m"), "-pp", "2", "--layer-partition", "3,5")
    assert shown.returncode == 0
    for word in ("qwen2", "0-2", "3-7", "hidden", "attention x5"):
        assert word in shown.stdout
    wrong = wavepp_cli("check-model", str(tmp_path / "m"), "-pp", "2", "--layer-partition", "3,4")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


def test_names_that_users_gave_are_shown_whole_and_as_they_are(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """However long they are, and whatever they look like in markup; nobody watches the terminal."""
    folder = tmp_path / ("[bold]" + 90 * "m")
    folder.symlink_to(tiny_llama)
    plan = wavepp_cli("plan", "--model", str(folder), "-pp", "2")
    assert plan.stdout.splitlines()[0] == f"{folder}, 2 stages, device cpu"
    check = wavepp_cli("check-model", str(folder))
    assert check.stdout.splitlines()[0] == str(folder)
    row = {"workload": "cold", "concurrency": 1, "prompt_len": 9, "input_tok_s": 5.0}
    file = tmp_path / f"[red]{90 * 'r'}.json"
    file.write_text(json.dumps({"meta": {}, "rows": [row]}))
    compared = wavepp_cli("bench", "compare", str(file), str(file))
    assert compared.stdout.splitlines()[0] == f"{file.name} over {file.name}", compared.stderr


def test_check_model_says_what_is_unsupported_and_fails(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rwkv", "vocab_size": 5}))
    shown = wavepp_cli("check-model", str(tmp_path))
    assert shown.returncode == 1
    assert "rwkv" in shown.stdout
    assert shown.stderr.count("\n") == 1
