"""Writes `prompts.jsonl`, the demo's input: OpenAI batch lines, one a request.

Chat questions with one-word answers, then a long handbook chapter several times, each time with
another question at its end, so that most of those prompts is one shared prefix.

    python examples/make_prompts.py            # after a change to handbook.md or the questions
"""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent

# Earlier turns of each conversation. They show a very small model that one word is wanted.
CHAT_START = [
    {"role": "system", "content": "You answer each question with one word."},
    {"role": "user", "content": "What is the capital of Spain?"},
    {"role": "assistant", "content": "Madrid"},
    {"role": "user", "content": "Do fish live in water?"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "What is the opposite of up?"},
    {"role": "assistant", "content": "Down"},
    {"role": "user", "content": "Can stones fly?"},
    {"role": "assistant", "content": "No"},
]

CHAT_QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of Italy?",
    "What is the opposite of hot?",
    "Who wrote Romeo and Juliet?",
    "Can cats read newspapers?",
    "Which planet is known as the red planet?",
    "What color is snow?",
    "What is the first month of the year?",
    "Which season comes after winter?",
    "What is the opposite of big?",
    "What language is spoken in Brazil?",
    "Which metal is used in most electric wires?",
    "What do bees make?",
    "Which country is Tokyo in?",
]

# The handbook's own examples, for the same reason.
HANDBOOK_START = """
Questions about this chapter, each with a short answer.

Question: How wide is the stilling well? Answer: 60 centimetres
Question: On which day does the assistant wipe the radar's horn? Answer: Monday
Question: Who sends the log to the survey? Answer: the keeper
"""

HANDBOOK_QUESTIONS = [
    "What is the float made of?",
    "What colour is the float painted?",
    "On which day may visitors come?",
    "In which month was the highest water ever measured?",
    "Which animals are the worst enemy of the well?",
    "May the crew work alone on the outer platform?",
]


def chat_line(number: int, question: str) -> dict[str, object]:
    """One `/v1/chat/completions` line that asks for the first token and its alternatives."""
    body = {
        "messages": [*CHAT_START, {"role": "user", "content": question}],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    url = "/v1/chat/completions"
    return {"custom_id": f"chat-{number:02d}", "method": "POST", "url": url, "body": body}


def handbook_line(number: int, handbook: str, question: str) -> dict[str, object]:
    """One `/v1/completions` line: the whole handbook, then a question with its answer missing."""
    prompt = f"{handbook}{HANDBOOK_START}Question: {question} Answer:"
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 3}
    url = "/v1/completions"
    return {"custom_id": f"handbook-{number:02d}", "method": "POST", "url": url, "body": body}


def lines() -> list[dict[str, object]]:
    """All lines, in the order of the file."""
    handbook = (HERE / "handbook.md").read_text(encoding="utf-8")
    chat = [chat_line(i, text) for i, text in enumerate(CHAT_QUESTIONS, 1)]
    book = [handbook_line(i, handbook, text) for i, text in enumerate(HANDBOOK_QUESTIONS, 1)]
    return chat + book


def render() -> str:
    """The text of the file."""
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines())


if __name__ == "__main__":
    (HERE / "prompts.jsonl").write_text(render(), encoding="utf-8")
