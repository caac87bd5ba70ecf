"""`quacklr generate` continues a text with real runs, and streams it."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from lab_runs import ATTENTIONS, METHODS, WORDS, environment, heed_ctrl_c, make_corpus, quacklr, small
from paused import MINUTES
from quacklr.lab.data import open_corpus
from quacklr.lab.data.command import main as prepare
from quacklr.lab.inference import command, sample
from quacklr.lab.methods import Default
from quacklr.lab.model import Decoder
from quacklr.lab.train.runner import run
from quacklr.lab.train.session import Session
from quacklr.lab.train.trained import open_run


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    run(small(corpus, Default(), ATTENTIONS["mla"], steps=12), out)
    return out


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*options: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = command.main([str(option) for option in options])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def greedy(model: Decoder, prompt: bytes | Sequence[int], most: int) -> list[int]:
    """Without a cache."""
    text = list(prompt)
    for _ in range(most):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


def test_the_prompt_and_what_follows_are_printed_and_a_summary_apart(finished: Path, said: Any) -> None:
    code, out, err = said(finished, "--prompt", "the cat ", "--temperature", "0", "--tokens", "5")
    follows = greedy(open_run(finished).model, b"the cat ", 5)
    assert 0 not in follows
    assert (code, out) == (0, "the cat " + bytes(follows).decode("utf-8", "replace") + "\n")
    assert err.startswith("5 tokens after a prompt of 8")
    assert err.count("\n") == 1
    assert "context is full" not in err
    assert f"{2 * 4 * (8 + 4)} bytes of cache a token" in err


def test_without_a_number_the_context_is_filled(finished: Path, said: Any) -> None:
    _, out, err = said(finished, "--prompt", "the cat ", "--temperature", "0")
    assert out == "the cat " + bytes(greedy(open_run(finished).model, b"the cat ", 8)).decode("utf-8", "replace") + "\n"
    assert "8 tokens after a prompt of 8" in err
    assert "the context is full" in err
    assert said(finished, "--prompt", "x" * 15)[0] == 0  # room for one


def test_the_same_seed_prints_the_same_and_another_something_else(finished: Path, said: Any) -> None:
    texts = [said(finished, "--prompt", "a", "--temperature", "2", "--seed", str(seed))[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_the_one_that_was_trained(corpus: Path, tmp_path: Path, said: Any, method: str) -> None:
    """Also with the corpus gone; and sigma-reparam's weights, made plain, are those that it computes in eval mode."""
    shutil.copytree(corpus, tmp_path / "corpus")
    config = small(tmp_path / "corpus", METHODS[method], ATTENTIONS["mla"], steps=6)
    session = Session(config, open_corpus(config.training.corpus))
    for _ in session.rows():
        pass
    run(config, tmp_path / "run")
    shutil.rmtree(tmp_path / "corpus")
    opened, tokens = open_run(tmp_path / "run"), torch.arange(32).view(2, 16)
    with torch.no_grad():
        expected = session.model.eval()(tokens)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(opened.model(tokens), expected, rtol=1e-5, atol=1e-6)
    assert not opened.model.training
    code, out, _ = said(tmp_path / "run", "--prompt", "the", "--temperature", "0", "--tokens", "13")
    assert (code, out.encode()[:3]) == (0, b"the")
    follows = greedy(opened.model, b"the", 13)
    assert out == "the" + bytes(follows).partition(b"\0")[0].decode("utf-8", "replace") + "\n"


def test_a_step_that_was_saved_can_be_asked_for(finished: Path, said: Any, corpus: Path) -> None:
    session = Session(small(corpus, Default(), ATTENTIONS["mla"], steps=12), open_corpus(str(corpus)))
    for row in session.rows():
        if row["step"] == 6:
            break
    opened, tokens = open_run(finished, step=6), torch.arange(16).view(1, 16)
    assert (opened.step, open_run(finished).step) == (6, 12)
    torch.testing.assert_close(opened.model(tokens), session.model(tokens).detach(), rtol=1e-5, atol=1e-6)
    assert said(finished, "--prompt", "the", "--step", "6")[0] == 0
    assert not torch.allclose(opened.model(tokens), open_run(finished).model(tokens))


class Terminal(io.StringIO):
    """A terminal that shows only flushed text."""

    shown = ""

    def flush(self) -> None:
        self.shown = self.getvalue()


def scripted(monkeypatch: pytest.MonkeyPatch, tokens: Sequence[int]) -> list[str]:
    """Makes the model generate these tokens; returns the text on the terminal before each of them."""
    terminal, seen = Terminal(), []
    monkeypatch.setattr(sys, "stdout", terminal)

    def sample_tokens(_: Decoder, __: Sequence[int], most: int, ___: Any) -> Iterator[int]:
        for token in tokens[:most]:
            seen.append(terminal.shown)
            yield token
        seen.append(terminal.shown)

    monkeypatch.setattr(sample, "sample_tokens", sample_tokens)
    return seen


def test_each_piece_is_on_the_terminal_before_the_next_is_computed(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = scripted(monkeypatch, "a\u00fcb".encode())
    assert command.main([str(finished), "--prompt", "go: ", "--tokens", "4"]) == 0
    assert seen == ["go: ", "go: a", "go: a", "go: a\u00fc", "go: a\u00fcb"]


def test_the_end_of_the_document_ends_the_text_and_is_not_shown(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(monkeypatch, b"ab\0cd")
    assert command.main([str(finished), "--prompt", "go"]) == 0
    assert getattr(sys.stdout, "shown", None) == "goab\n"
    assert "cd" not in capsys.readouterr().err


def test_the_prompt_can_come_from_stdin(finished: Path, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("the \u00fc\n".encode())))
    code, out, err = said(finished, "--prompt", "-", "--tokens", "2")
    assert (code, out[:6]) == (0, "the \u00fc\n")
    assert "after a prompt of 7" in err


def test_words_that_a_tokenizer_joins_by_spaces_stay_apart(tmp_path: Path, said: Any) -> None:
    """A decoder in the way of sentencepiece drops the space of its first token, which is not the first here."""
    make_corpus(tmp_path)
    vocabulary = {f"\u2581{word}": i for i, word in enumerate(WORDS)} | {"<unk>": 16, "</s>": 17}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>"))
    words.pre_tokenizer, words.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    words.save(str(tmp_path / "words.json"))
    options = ["--out", str(tmp_path / "words"), "--tokenizer", str(tmp_path / "words.json")]
    assert prepare([str(tmp_path / "source.jsonl"), *options, "--val", "0.1", "--probe", "0.1"]) == 0
    run(small(tmp_path / "words", Default(), ATTENTIONS["mha"], steps=6), tmp_path / "run")
    follows = greedy(open_run(tmp_path / "run").model, words.encode("the cat").ids, 4)
    assert not {16, 17} & set(follows)
    _, out, _ = said(tmp_path / "run", "--prompt", "the cat", "--temperature", "0", "--tokens", "4")
    assert out == " ".join(["the cat", *(WORDS[token] for token in follows)]) + "\n"


def test_ids_that_the_tokenizer_does_not_have_are_never_sampled(corpus: Path, tmp_path: Path, said: Any) -> None:
    """--vocab may be rounded up."""
    config = small(corpus, Default(), ATTENTIONS["mha"], steps=6)
    run(replace(config, shape=replace(config.shape, vocab=4096)), tmp_path / "run")
    code, out, err = said(tmp_path / "run", "--prompt", "a", "--temperature", "5", "--top-p", "1")
    assert code == 0, err
    assert out.startswith("a")


# The command, which waits after the first token until a file is there, or Ctrl-C comes.
HELD = """
import sys, time
from pathlib import Path
from quacklr.cli import main
from quacklr.lab.inference import command

def held(*given, real=command.continuation):
    for number, token in enumerate(real(*given)):
        while number == 1 and not Path(sys.argv[1]).exists():
            time.sleep(0.01)
        yield token

command.continuation = held
sys.exit(main(sys.argv[2:]))
"""


def started(go: Path, finished: Path) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-c", HELD, str(go), "generate", str(finished), "--prompt", "the ", "--temperature", "0"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(line, **pipes, env=environment(), preexec_fn=heed_ctrl_c)


def test_text_comes_while_the_process_is_at_work_and_ctrl_c_ends_it_tidily(finished: Path, tmp_path: Path) -> None:
    process = started(tmp_path / "never", finished)
    assert process.stdout
    assert process.stdout.read(5)[:4] == b"the "
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60 * MINUTES)
    assert (process.returncode, out, err) == (130, b"\n", b"")


def test_a_closed_pipe_gives_no_traceback(finished: Path, tmp_path: Path) -> None:
    process = started(tmp_path / "go", finished)
    assert process.stdout
    assert process.stderr
    assert process.stdout.read(5)[:4] == b"the "
    process.stdout.close()
    (tmp_path / "go").touch()
    with process.stderr:
        err = process.stderr.read()
    assert process.wait(timeout=60 * MINUTES) == 1
    assert err == b""


@pytest.mark.parametrize("way", ["stdin", "option"])
def test_a_prompt_that_is_no_utf_8_is_no_crash(finished: Path, way: str) -> None:
    """Refused in a sentence, or its bytes replaced."""
    env = {"PYTHONIOENCODING": "utf-8:strict"}  # as in every locale but C
    prompt, given = ("-", b"a\xff") if way == "stdin" else (os.fsdecode(b"a\xff"), b"")
    line = [sys.executable, "-m", "quacklr", "generate", str(finished), "--prompt", prompt, "--tokens", "2"]
    done = subprocess.run(line, input=given, capture_output=True, env=environment(**env), check=False)
    assert b"Traceback" not in done.stderr
    assert done.returncode in (0, 2)


def test_a_terminal_that_knows_no_unicode_is_no_crash(finished: Path) -> None:
    ways = environment(PYTHONIOENCODING="ascii")
    done = quacklr("generate", finished, "--prompt", "a", "--temperature", "5", "--top-p", "1", env=ways)
    assert done.returncode in (0, 2)
    assert "Traceback" not in done.stderr
