"""A small byte-level BPE tokenizer with a chat template, for tiny checkpoints.

Any text round-trips: all 256 bytes are tokens. Merges are learned from a few lines below, so the
files are the same every time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAD_ID, BOS_ID, EOS_ID, TURN_START_ID, TURN_END_ID = range(5)
_SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>")
_TEXT = (
    "The quick brown fox jumps over the lazy dog, and then the dog sleeps in the sun.",
    "What is the capital of France? The capital of France is the city of Paris.",
    "A pipeline has stages, and every stage has layers; a wave of tokens goes through all of them.",
    "In the beginning there was the prompt, and the prompt was long, and it was read once.",
    "You are a helpful assistant. Answer the question with a short sentence, please.",
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tokenizer(out: Path, vocab_size: int) -> None:
    """Writes tokenizer.json, its config and the chat template; at most `vocab_size` ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    build: Any = PreTrainedTokenizerFast
    fast = build(
        tokenizer_object=tokenizer,
        pad_token=_SPECIAL[PAD_ID],
        bos_token=_SPECIAL[BOS_ID],
        eos_token=_SPECIAL[EOS_ID],
        additional_special_tokens=list(_SPECIAL[TURN_START_ID:]),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(str(out))
