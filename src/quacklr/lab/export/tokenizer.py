"""Convert the tokenizer of a run to transformers: the same text gives the same ids, without added tokens."""

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
"""The name of byte 0 as a token."""


def convert(run: Trained, path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of the run in `path`. Special tokens in a text are split like other text, as in the corpus."""
    from transformers import PreTrainedTokenizerFast

    kind: Any = PreTrainedTokenizerFast
    is_bytes = isinstance(run.tokenizer, ByteTokenizer)
    end = END if is_bytes else run.tokenizer.end_token
    return kind(
        tokenizer_object=byte_tokenizer() if is_bytes else file_tokenizer(path / TOKENIZER),
        bos_token=end,
        eos_token=end,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_max_length=run.config.shape.context,
    )


def file_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the corpus, without its post-processor, which could add tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = None
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """One token per UTF-8 byte, as BPE without merges. NUL characters are dropped: byte 0 ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letter_of_byte: Any = bytes_to_unicode  # untyped
    letters = {letter: byte for byte, letter in letter_of_byte().items() if byte}
    tokenizer = Tokenizer(models.BPE(vocab={END: 0} | letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
