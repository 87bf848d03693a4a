"""The tokenizer: byte-level BPE of some 550 entries over pieces that never join a word with its neighbours.

A word must be the same tokens wherever it stands, or it cannot be learned to be copied: so letters, pairs of
digits, line ends and all that stands between words are split before BPE merges anything. And no name may be a
token of its own, or it would have to be learned by itself: BPE sees their syllables alone.
"""

from __future__ import annotations

import itertools
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tiny_policy.teacher import MIXED, demonstration
from turnstile_server.demo import TINY
from turnstile_server.demo.errands import errands

VOCABULARY = 576
END = "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = TINY / "chat_template.jinja"
_PIECES = r"\n|\p{L}+|\d{1,2}|[^\n\p{L}\d]+"
_CORPUS = 300


def make_tokenizer(tool_lines: str) -> PreTrainedTokenizerFast:
    """Trained on the family's own text and on ``tool_lines``, what the template prints of the tools."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=VOCABULARY - len(TAGS) - 3,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(tool_lines), trainer)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        eos_token=END,
        pad_token="<|endoftext|>",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.chat_template = TEMPLATE.read_text("utf-8")
    return tokenizer


def _corpus(tool_lines: str) -> list[str]:
    draw = random.Random(0)
    texts = []
    for errand in itertools.islice(errands(0), _CORPUS):
        conversation = [tool_lines, "system\nuser\nassistant\ntool\n", errand.instruction]
        conversation += [f"     {number}\t{text}" for number, text in enumerate(errand.files.values(), 1)]
        conversation += [f"Wrote 4 bytes to {errand.target}.txt.", *demonstration(errand, MIXED, draw)]
        text = "\n".join(conversation)
        for tag in TAGS:
            text = text.replace(tag, "\n")
        for name in (*errand.notes, *(word for word, _ in errand.lines), errand.target):
            text = text.replace(name, draw.choice((name[:2], name[2:])))
        texts.append(text)
    return [*texts, *(f"{pair:02d}" for pair in range(100) for _ in range(_CORPUS))]
