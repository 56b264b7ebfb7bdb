"""Sentences as numbers.

A word's number is a hash of it, so that no vocabulary need be built, sent or agreed on: every
client and the public captions have the same. Different words seldom share one (about 1 in 20 of
the 8,000 words of a small corpus does, at the default size).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raysim.errors import ConfigError, DataError

HASH = "hash"
WORDS = 8192
_WORD = re.compile(r"[a-z0-9]+|[^\sa-z0-9]")


def encode(
    sentences: Sequence[str], length: int, tokenizer: str = HASH
) -> tuple[npt.NDArray[np.int64], int]:
    """Token numbers, (n, length) with zeros behind the last word, and how many there may be.
    `tokenizer` is `hash`, or the folder or hub name of a pre-trained one."""
    if length < 1:
        raise ConfigError(f"--data.text-length must be at least 1, got {length}")
    if tokenizer != HASH:
        return _pretrained(sentences, length, tokenizer)
    numbers: dict[str, int] = {}
    tokens = np.zeros((len(sentences), length), dtype=np.int64)
    for row, sentence in zip(tokens, sentences, strict=True):
        words = _WORD.findall(sentence.lower())[:length]
        for word in words:
            if word not in numbers:
                numbers[word] = 1 + zlib.crc32(word.encode()) % (WORDS - 1)
        row[: len(words)] = [numbers[word] for word in words]
    return tokens, WORDS


def _pretrained(
    sentences: Sequence[str], length: int, tokenizer: str
) -> tuple[npt.NDArray[np.int64], int]:
    try:
        from transformers import AutoTokenizer  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ConfigError(
            f"--data.tokenizer {tokenizer} needs transformers: pip install 'raysim[transformers]'"
        ) from None
    try:
        found: Any = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"--data.tokenizer {tokenizer} cannot be loaded: {reason}") from error
    if found.pad_token_id != 0:
        raise DataError(
            f"--data.tokenizer {tokenizer} pads with {found.pad_token_id}; raysim's text models "
            "take 0 for padding, as BERT's and DistilBERT's tokenizers do"
        )
    given = found(
        list(sentences), padding="max_length", truncation=True, max_length=length,
        return_tensors="np",
    )  # fmt: skip
    return np.asarray(given["input_ids"], dtype=np.int64), len(found)
