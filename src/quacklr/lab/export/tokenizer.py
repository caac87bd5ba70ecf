"""The tokenizer of a run as transformers reads it: the same ids for the same text, and nothing added."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quacklr.lab.data.manifest import TOKENIZER
from quacklr.lab.data.tokenizer import ByteTokenizer
from quacklr.lab.train.trained import Trained

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
"""What byte 0 is called where tokens must have names."""


def made(run: Trained, path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of the run in this folder; special tokens in a text are text, as they were in the corpus."""
    from transformers import PreTrainedTokenizerFast

    kind: Any = PreTrainedTokenizerFast
    is_bytes = isinstance(run.tokenizer, ByteTokenizer)
    end = END if is_bytes else run.tokenizer.end_token
    return kind(
        tokenizer_object=of_bytes() if is_bytes else of_file(path / TOKENIZER),
        bos_token=end,
        eos_token=end,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_max_length=run.config.shape.context,
    )


def of_file(path: Path) -> Tokenizer:
    """What a corpus was written with. Its post-processor is dropped: it may add tokens that no training has seen."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = None
    return tokenizer


def of_bytes() -> Tokenizer:
    """UTF-8, a byte a token, as BPE that never merges. Byte 0 has no token, so that a NUL in a text is dropped."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letter_of_byte: Any = bytes_to_unicode  # which has no types
    letters = {letter: byte for byte, letter in letter_of_byte().items() if byte}
    tokenizer = Tokenizer(models.BPE(vocab={END: 0} | letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
