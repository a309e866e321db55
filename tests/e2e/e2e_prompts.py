"""Fifty short prompts of many kinds: chat questions, sentences to finish, lists, code, numbers."""

from __future__ import annotations

CHAT = [
    "What is the capital of Germany?",
    "What is the largest ocean on Earth?",
    "How many legs does a spider have?",
    "Name a fruit that is yellow.",
    "Is water wet?",
    "Write a short poem about the sea.",
    "Translate 'good morning' to French.",
    "What is 7 times 8?",
    "Why is the sky blue?",
    "Give me three tips for sleeping well.",
    "Who painted the Mona Lisa?",
    "What does a carpenter do?",
    "Explain gravity to a child.",
    "What is the boiling point of water in Celsius?",
    "Summarise this: The meeting was moved from Monday to Thursday because of the storm.",
]

SENTENCES = [
    "The quick brown fox jumps over the lazy",
    "Once upon a time there was a little girl who lived in a",
    "The first president of the United States was George",
    "To be or not to be, that is the",
    "The sun rises in the",
    "In 1969, humans first landed on the",
    "A triangle has three",
    "The chemical symbol for gold is",
    "My favourite season is autumn because the leaves",
    "The train leaves at noon and arrives at",
    "She opened the door and saw a",
    "The recipe asks for two eggs, a cup of flour and a pinch of",
    "The lighthouse keeper climbed the stairs to light the",
    "He forgot his umbrella, so when it started to rain he got",
    "Paris is to France as Rome is to",
    "Bees make honey and cows give",
    "The opposite of day is",
    "An apple a day keeps the doctor",
    "The ship sailed across the",
    "Photosynthesis turns carbon dioxide and water into",
]

LISTS_AND_CODE = [
    "one, two, three, four, five, six,",
    "Monday, Tuesday, Wednesday, Thursday,",
    "2, 4, 6, 8, 10,",
    "a b c d e f g h i j",
    "January, February, March,",
    "def add(a, b):\n    return a +",
    "for i in range(10):\n    print(",
    "import numpy as",
    "SELECT name FROM users WHERE",
    '{"name": "Ada", "born": 1815, "field":',
    "<html><head><title>Home</title></head><body><h1>Welcome</h1><p>",
    "x = 5\ny = 7\nprint(x + y)  # prints",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the capital of Japan?\nA:",
    "Roses are red, violets are",
]

assert len(CHAT) + len(SENTENCES) + len(LISTS_AND_CODE) == 50
