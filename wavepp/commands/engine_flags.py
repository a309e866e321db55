"""The engine's flags, made from the fields of EngineConfig: the one place where they are.

A field becomes `--its-name`, its description the help, a bool `--x/--no-x`. Only what was given on
the command line counts as given, so that `--config FILE.yaml` fills the rest.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from wavepp.config import EngineConfig, build_config
from wavepp.errors import ConfigError

EXTRA_NAMES = {"pipeline_parallel_size": ["-pp"]}
CONFIG_HELP = "YAML file of `flag-name: value` lines; flags given here win"


def engine_command(
    command: Callable[..., None], *, left_out: frozenset[str] = frozenset()
) -> Callable[..., None]:
    """A command with every engine flag added; `command` gets the EngineConfig as `config`.

    Args:
        command: its parameter `config` is replaced by the flags; its others stay.
        left_out: fields of EngineConfig that get no flag here.
    """
    own = inspect.signature(command, eval_str=True).parameters
    assert "config" in own, command
    flags = [
        _flag(name, info)
        for name, info in EngineConfig.model_fields.items()
        if name not in left_out
    ]
    taken = [flag.name for flag in flags]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name in taken}
        yaml_path = values.pop("config_file")
        options = {name: value for name, value in given.items() if value is not None}
        config = build_config(options, yaml_path)
        command(config=config, **values)

    others = [parameter for name, parameter in own.items() if name != "config"]
    keyword = inspect.Parameter.KEYWORD_ONLY
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=keyword) for parameter in (*others, *flags, _config_flag())]
    )
    del run.__wrapped__
    run.__annotations__ = {}
    return run


def _config_flag() -> inspect.Parameter:
    option = typer.Option("--config", metavar="FILE.yaml", help=CONFIG_HELP)
    return _parameter("config_file", Path, option)


def _flag(name: str, info: FieldInfo) -> inspect.Parameter:
    """One field as a command-line option that is None unless it was given."""
    kind, flag = _plain_type(name, info.annotation), f"--{name.replace('_', '-')}"
    names = [f"{flag}/--no-{flag[2:]}"] if kind is bool else [flag, *EXTRA_NAMES.get(name, [])]
    option = typer.Option(*names, help=_help(info), metavar=_metavar(name, info, kind))
    return _parameter(name, kind, option)


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _help(info: FieldInfo) -> str:
    """The description, with the default where it says none itself."""
    assert info.description, info
    if info.is_required():
        return f"{info.description} (required)"
    if info.default is None or "default" in info.description:
        return info.description
    if isinstance(info.default, bool):
        return f"{info.description} (default: {'on' if info.default else 'off'})"
    return f"{info.description} (default: {info.default})"


def _metavar(name: str, info: FieldInfo, kind: Any) -> str | None:
    if name == "layer_partition":
        return "8,8,7,7"
    if get_origin(info.annotation) is Literal:
        return "|".join(str(choice) for choice in get_args(info.annotation))
    return {int: "N", float: "X", str: "TEXT"}.get(kind)


def _plain_type(name: str, annotation: Any) -> Any:
    """The type a flag's text is read as: the field's, without None.

    Lists and choices stay text, which the field reads and checks: one message, here as in YAML.
    """
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        assert len(kinds) == 1, (name, annotation)
        annotation = kinds[0]
    if get_origin(annotation) in (tuple, Literal):
        return str
    if annotation not in (int, float, str, bool):
        raise ConfigError(f"{name}: no flag can be made of {annotation}")
    return annotation
