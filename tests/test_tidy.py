"""Rules on the code that no linter at hand checks: sizes, words, pure decisions, public names."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import wavepp

ROOT = Path(__file__).parent.parent
PURE = ("cache", "protocol", "planner", "control", "sim")
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
POSITIONAL_MAX = 5

PUBLIC_NAMES = [
    "LLM",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "LocalProtocolError",
    "PrefillRequest",
    "PrefillResult",
    "ProtocolError",
    "QueueFullError",
    "RemoteProtocolError",
    "RequestError",
    "WavePPError",
    "__version__",
]

# pattern -> what to do instead
BANNED_WORDS = {
    r"\b(TODO|FIXME|XXX|HACK)\b": "finish it, or leave it out and say so in the README",
    r"\bNotImplementedError\b": "raise ConfigError or RequestError, with what is supported",
    r"/(work|root|home)/\w": "no paths of one machine",
    r"\bissue #?\d": "say what was wrong, not where it was discussed",
    r"\.\./shared|design/0\d|\bthis workplace\b": "say the thing itself",
    r"\bMixin\b": "compose",
}

# Modules whose answers differ from run to run or between processes; names are calls.
IMPURE_MODULES = {"time", "random", "datetime", "uuid", "secrets", "os", "threading", "asyncio"}
ALLOWED_ATTRIBUTES = {("random", "Random")}
IMPURE_CALLS = {"hash", "id", "input", "open", "print", "eval", "exec"}


def python_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found, folders
    return found


def text_files() -> Iterator[Path]:
    for folder in ("wavepp", "tests", "scripts", "examples", "docs", "notebooks", ".ci"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".png":
                yield path
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted(ROOT.glob("*.toml"))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def test_files_are_short() -> None:
    files = python_files("wavepp", "tests", "examples")
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: count for name, count in lines.items() if count > FILE_LINES_MAX} == {}


def test_test_modules_have_names_of_their_own() -> None:
    """pytest can't collect two of one name; helpers of one name would shadow each other."""
    names = Counter(path.name for path in python_files("tests") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_functions_are_short_and_take_few_positional_arguments() -> None:
    problems = []
    for path in python_files("wavepp", "tests", "examples"):
        for function in functions(path):
            lines = (function.end_lineno or 0) - function.lineno + 1
            arguments = [*function.args.posonlyargs, *function.args.args]
            count = sum(argument.arg not in ("self", "cls") for argument in arguments)
            if lines > FUNCTION_LINES_MAX:
                problems.append(f"{place(path, function)} {function.name}: {lines} lines")
            # Tests, commands and Hypothesis rules get their arguments by name.
            ruled = any(ast.unparse(by).startswith("rule(") for by in function.decorator_list)
            by_name = ruled or function.name.startswith("test_") or path.name == "cli.py"
            if count > POSITIONAL_MAX and not by_name:
                problems.append(f"{place(path, function)} {function.name}: {count} positional")
    assert problems == []


def test_modules_say_what_they_own() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in python_files("wavepp", "tests", "examples")
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


@pytest.mark.parametrize("pattern", BANNED_WORDS)
def test_no_text_holds_banned_words(pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in text_files()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == [], BANNED_WORDS[pattern]


def test_public_names_are_these() -> None:
    assert sorted(wavepp.__all__) == sorted(PUBLIC_NAMES)
    assert all(hasattr(wavepp, name) for name in PUBLIC_NAMES)


def test_errors_are_not_swallowed() -> None:
    """No handler that catches everything and does nothing, no global statement."""
    problems = []
    for path in python_files("wavepp"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                kind = ast.unparse(node.type) if node.type else ""
                silent = all(isinstance(step, ast.Pass | ast.Continue) for step in node.body)
                if not kind or (silent and kind in ("Exception", "BaseException")):
                    problems.append(f"{place(path, node)} except {kind}")
            if isinstance(node, ast.Global):
                problems.append(f"{place(path, node)} global")
    assert problems == []


def impurities(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """What could make two stages, or two runs, decide differently."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                if module in IMPURE_MODULES and (module, name) not in ALLOWED_ATTRIBUTES:
                    yield node, f"{module}.{name}"
            case ast.Call(func=ast.Name(id=name)) if name in IMPURE_CALLS:
                yield node, f"{name}()"
            case ast.For(iter=over) | ast.comprehension(iter=over):
                if re.match(r"(set|frozenset)\(", ast.unparse(over)) or isinstance(over, ast.Set):
                    yield over, "iteration over a bare set: sort it"
            case _:
                pass


def test_pure_packages_decide_alike_everywhere() -> None:
    folders = [f"wavepp/{name}" for name in PURE if (ROOT / "wavepp" / name).is_dir()]
    problems = [
        f"{place(path, node)} {what}"
        for path in python_files(*folders)
        for node, what in impurities(ast.parse(path.read_text()))
    ]
    assert problems == []


def test_impurities_are_seen() -> None:
    source = "for x in set(y):\n  hash(x); time.time(); random.random(); random.Random(1)"
    assert sorted(what for _, what in impurities(ast.parse(source))) == [
        "hash()",
        "iteration over a bare set: sort it",
        "random.random",
        "time.time",
    ]
