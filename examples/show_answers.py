"""Prints a batch's answers for people: the prompt's end, the first token, what else was likely.

python examples/show_answers.py prompts.jsonl answers.jsonl
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

TAIL_CHARS = 52
TABLE_WIDTH = 118


def read_lines(path: str) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def prompt_tail(body: dict[str, Any]) -> str:
    """The last words of a prompt, on one line."""
    text = body["messages"][-1]["content"] if "messages" in body else str(body["prompt"])
    text = " ".join(text.split())
    if len(text) <= TAIL_CHARS:
        return text
    return f"... {text[-TAIL_CHARS:].split(' ', 1)[1]}"  # from a whole word on


def first_token(choice: dict[str, Any]) -> tuple[str, float, dict[str, float]]:
    """(the first token, its log probability, token -> log probability of the likeliest)."""
    logprobs = choice["logprobs"]
    if "content" in logprobs:
        token = logprobs["content"][0]
        top = {other["token"]: other["logprob"] for other in token["top_logprobs"]}
        return token["token"], token["logprob"], top
    return logprobs["tokens"][0], logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]


def row(body: dict[str, Any], answer: dict[str, Any]) -> tuple[str, str, str, str]:
    """One line of the table: prompt, token, probability, alternatives."""
    response = answer["response"]
    if answer.get("error") or response is None or response["status_code"] != 200:
        error = answer.get("error") or response
        return prompt_tail(body), "error", "", json.dumps(error, ensure_ascii=False)
    token, logprob, top = first_token(response["body"]["choices"][0])
    others = [f"{other!r} {math.exp(value):.0%}" for other, value in top.items() if other != token]
    return prompt_tail(body), repr(token), f"{math.exp(logprob):.1%}", ", ".join(others)


def main() -> None:
    """Reads both files and prints the table."""
    prompts = {line["custom_id"]: line["body"] for line in read_lines(sys.argv[1])}
    table = Table("prompt ends with", "first token", "probability", "also likely", box=None)
    for answer in read_lines(sys.argv[2]):
        cells = row(prompts[answer["custom_id"]], answer)
        table.add_row(*(escape(cell) for cell in cells))
    Console(width=max(Console().width, TABLE_WIDTH)).print(table)


if __name__ == "__main__":
    main()
