"""Sampling follows the model's probabilities, and text is yielded as soon as its characters are complete."""

from __future__ import annotations

import codecs
import json
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from lab_runs import ATTENTIONS
from quacklr.lab.data.command import main as prepare
from quacklr.lab.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer
from quacklr.lab.errors import UserError
from quacklr.lab.inference.sample import SamplingParams, sample_tokens
from quacklr.lab.inference.stream import decode_stream
from quacklr.lab.model import Decoder, Shape, build
from quacklr.lab.model.cache import Cache

SHAPE = Shape(d_model=16, layers=2, d_ff=24, context=16, vocab=256, init_std=0.3)
HALVES = [0.5, 0.25, 0.125, 0.0625, 0.0625]  # sums of these are exact


def logits_of(*shares: float) -> Tensor:
    return torch.tensor(shares, dtype=torch.float64).log()


def softmax(logits: list[float], temperature: float) -> list[float]:
    weights = [math.exp(logit / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def test_temperature_0_is_greedy_and_draws_no_random_number() -> None:
    choose = SamplingParams(temperature=0, top_p=0.5).sampler()
    assert [choose(torch.tensor(logits)) for logits in ([1.0, 3.0, 2.0], [5.0, -1.0, 4.999], [0.0, 0.0, 1e-6])] == [
        1,
        0,
        2,
    ]


@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=8), st.floats(0.25, 10))
def test_probabilities_are_the_softmax_at_the_temperature(logits: list[float], temperature: float) -> None:
    got = SamplingParams(temperature, top_p=1).probabilities(torch.tensor(logits))
    assert got.tolist() == pytest.approx(softmax(logits, temperature), abs=1e-12)


def test_no_temperature_is_too_small_or_too_large() -> None:
    logits = torch.tensor([300.0, -2.0, 300.0, 299.0])
    assert SamplingParams(1e-30, top_p=1).probabilities(logits).tolist() == [0.5, 0, 0.5, 0]
    assert SamplingParams(5e-324, top_p=1).probabilities(logits).tolist() == [0.5, 0, 0.5, 0]
    assert SamplingParams(1e30, top_p=1).probabilities(logits).tolist() == pytest.approx([0.25] * 4)


@pytest.mark.parametrize(
    ("top_p", "nucleus"),
    [(1e-9, 1), (0.5, 1), (0.5001, 2), (0.75, 2), (0.76, 3), (0.875, 3), (0.88, 4), (0.9375, 4), (0.94, 5), (1, 5)],
)
def test_the_nucleus_is_the_fewest_likeliest_tokens_that_reach_top_p(top_p: float, nucleus: int) -> None:
    """Out of order in the vocabulary; of two that are equally likely the first."""
    place = [3, 1, 4, 0, 2]  # of each of HALVES
    logits = torch.empty(5, dtype=torch.float64).scatter(0, torch.tensor(place), logits_of(*HALVES))
    got = SamplingParams(temperature=1, top_p=top_p).probabilities(logits)
    kept = HALVES[:nucleus]
    wanted = dict.fromkeys(range(5), 0.0) | {at: each / sum(kept) for at, each in zip(place, kept, strict=False)}
    if nucleus == 4:  # 0 and 2 are equally likely
        assert sorted(got.tolist()) == pytest.approx(sorted(wanted.values()))
    else:
        assert got.tolist() == pytest.approx([wanted[at] for at in range(5)])


def test_the_nucleus_is_that_of_the_probabilities_at_the_temperature() -> None:
    cold, hot = (SamplingParams(t, top_p=0.75).probabilities(logits_of(0.5, 0.3, 0.2)) for t in (0.25, 4))
    assert int((cold > 0).sum()) == 1  # 0.5^4 is 0.87 of the sum of fourth powers
    assert int((hot > 0).sum()) == 3


def test_tokens_are_sampled_with_their_probabilities() -> None:
    """Chi-square with 3 degrees of freedom is above 16.3 once in a thousand."""
    choose, shares = (
        SamplingParams(temperature=1, top_p=0.9375, seed=5).sampler(),
        [each / 0.9375 for each in HALVES[:4]],
    )
    drawn = [choose(logits_of(*HALVES)) for _ in range(4000)]
    counts = [drawn.count(token) for token in range(5)]
    assert counts[4] == 0
    assert sum((n - 4000 * p) ** 2 / (4000 * p) for n, p in zip(counts, shares, strict=False)) < 16.3


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_refused(temperature: float, wrong: float) -> None:
    with pytest.raises(UserError, match="NaN or inf"):
        SamplingParams(temperature).sampler()(torch.tensor([1.0, wrong, 0.0]))


class Watched(Decoder):
    """Notes how many tokens each forward reads."""

    read: list[int]

    def decode_step(self, tokens_BT: Tensor, caches: Sequence[Cache]) -> Tensor:
        self.read.append(tokens_BT.shape[1])
        return super().decode_step(tokens_BT, caches)


def watched(attention: str) -> Watched:
    model = build(SHAPE, ATTENTIONS[attention], seed=4)
    model.__class__ = Watched
    assert isinstance(model, Watched)
    model.read = []
    return model


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_greedy_tokens_are_those_of_the_model_without_caches(attention: str) -> None:
    model, text = watched(attention), list(b"hello")
    for _ in range(11):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert len(set(text[5:])) > 2
    assert list(sample_tokens(model, b"hello", 11, SamplingParams(temperature=0).sampler())) == text[5:]
    assert model.read == [5] + [1] * 10


def test_a_token_is_there_before_the_next_is_computed() -> None:
    model = watched("mla")
    stream = sample_tokens(model, b"hello", 11, SamplingParams().sampler())
    assert model.read == []
    assert (next(stream), model.read)[1] == [5]
    assert (next(stream), model.read)[1] == [5, 1]
    assert len(list(stream)) == 9


def test_the_same_seed_gives_the_same_tokens_and_another_gives_others() -> None:
    model = watched("mha")
    one, same, other = (
        list(sample_tokens(model, b"duck", 12, SamplingParams(1, 1, seed).sampler())) for seed in (3, 3, 4)
    )
    assert one == same != other


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    """Byte-level BPE of a text with so many Chinese characters that some tokens end within one."""
    folder = tmp_path_factory.mktemp("words")
    rng = random.Random(0)
    words = [
        "\u00fcber",
        "na\u00efve",
        "\U0001f986\U0001f986",
        "the",
        "duck",
        *[f"\u6587{chr(0x4E00 + i)}" for i in range(48)],
    ]
    texts = [" ".join(rng.choices(words, k=100)) for _ in range(60)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ["--tokenizer", "train:300", "--val", "0.1", "--probe", "0.1"]
    assert prepare([str(folder / "text.jsonl"), "--out", str(folder / "corpus"), *options]) == 0
    return JsonTokenizer((folder / "corpus/tokenizer.json").read_bytes(), "trained")


def bytes_of(tokenizer: Any, token: int) -> bytes:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others for 256 and on."""
    if isinstance(tokenizer, ByteTokenizer):
        return bytes([token])
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in plain}
    letters |= {chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in plain)}
    return bytes(letters[letter] for letter in tokenizer._tokenizer.id_to_token(token))


def text_before_each_token(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """The text yielded before each next token is requested, and at the end."""
    text, seen = "", []

    def requested() -> Iterator[int]:
        for token in tokens:
            seen.append(text)
            yield token
        seen.append(text)

    for piece in decode_stream(tokenizer, requested()):
        text += piece
    return [*seen[1:], text]


def assert_yielded_in_time(tokenizer: Tokenizer, tokens: list[int]) -> None:
    """Compare with Python's incremental decoder."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    wanted, text = [], ""
    for token in tokens:
        text += decoder.decode(bytes_of(tokenizer, token))
        wanted.append(text)
    assert text_before_each_token(tokenizer, tokens) == [*wanted, text + decoder.decode(b"", final=True)]


TEXTS = ["\u00fcber", "a\U0001f986b", "\u4e2d\u6587\u5b57", "e\u0301\u0308x", "\U0001f468\u200d\U0001f469", "a b  c\n"]
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufffd"), max_size=12)


@given(ANY_TEXT | st.sampled_from(TEXTS))
def test_each_character_is_yielded_with_its_last_byte(text: str) -> None:
    assert_yielded_in_time(ByteTokenizer(), list(text.encode()))


@given(text=ANY_TEXT | st.sampled_from(TEXTS) | st.text("\u4e2d\u6587\u5b57\u00fc \U0001f986", max_size=12))
def test_each_character_is_yielded_with_its_last_token(trained: JsonTokenizer, text: str) -> None:
    assert_yielded_in_time(trained, trained.encode(text))


LEADING = b"\xff\xff\xff\xe2\x82\xac"  # three bytes that are no text, then the euro
PARTS = st.sampled_from([b"\xe2\x82", b"\xac", b"\xf0\x9f\xa6\x86", b"\xff", b"a", b"\xc3", b"\xa4"])


@given(st.binary(max_size=12) | st.lists(PARTS, max_size=8).map(b"".join))
@example(LEADING)
def test_the_stream_of_any_bytes_adds_up_to_their_text(content: bytes) -> None:
    assert "".join(decode_stream(ByteTokenizer(), content)) == content.decode("utf-8", "replace")


@given(tokens=st.lists(st.integers(1, 290), max_size=12) | st.lists(st.integers(120, 290), max_size=12))
def test_the_stream_of_any_tokens_adds_up_to_their_text(trained: JsonTokenizer, tokens: list[int]) -> None:
    content = b"".join(bytes_of(trained, token) for token in tokens)
    assert "".join(decode_stream(trained, tokens)) == content.decode("utf-8", "replace")


def test_bytes_that_are_no_character_do_not_hold_up_the_stream() -> None:
    content = iter(b"\xff" * 100)
    assert next(decode_stream(ByteTokenizer(), content)) == "\ufffd"
    assert len([*content]) == 96, "a character has at most four bytes"


def test_the_tokens_that_are_decoded_again_stay_few(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    decode = ByteTokenizer.decode

    def counted(self: ByteTokenizer, ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return decode(self, ids)

    monkeypatch.setattr(ByteTokenizer, "decode", counted)
    text = "a text, and \U0001f986 " * 20
    assert "".join(decode_stream(ByteTokenizer(), text.encode())) == text
    assert max(sizes) <= 8


def test_an_incomplete_last_character_becomes_a_replacement_character() -> None:
    assert list(decode_stream(ByteTokenizer(), b"ab\xc3")) == ["a", "b", "\ufffd"]


def test_a_word_keeps_the_space_before_it_where_a_decoder_drops_that_of_the_first() -> None:
    vocabulary = {"\u2581the": 0, "\u2581red": 1, "\u2581duck": 2, "s": 3, "</s>": 4}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "s"))
    words.decoder = tokenizers.decoders.Metaspace()
    tokenizer = JsonTokenizer(words.to_str().encode(), "words")
    assert tokenizer.decode([0, 1, 2, 3]) == "the red ducks"
    assert "".join(decode_stream(tokenizer, [0, 1, 2, 3])) == "the red ducks"
