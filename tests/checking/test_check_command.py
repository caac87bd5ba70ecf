"""`quacklr check`, as a person types it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from model_source import MODELS
from quacklr.cli import main

MORE = """
def with_optimizer():
    model, batch = declared()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batch
class FirstOnly(nn.Sequential):
    def forward(self, x): return self[0](x)
def first_only(): return FirstOnly(Declared(), Declared(), Declared()), torch.randn(2, 5, 16)
def idle_optimizer():
    model, batch = unheard_of()
    return model, [torch.optim.SGD(model.parameters(), lr=0.0)], batch
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the current directory."""
    (tmp_path / "models_to_check.py").write_text(MODELS + MORE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "models_to_check", raising=False)
    return "models_to_check"


@pytest.mark.parametrize(
    ("arguments", "code", "found"),
    [
        ([".py:with_optimizer", "--growth", "2", "--tau", "0.5"], 0, "\n\ncorrect: 3 of 3 layers"),
        ([":unheard_of"], 0, "\n\ncorrect: 3 of 3 layers"),
        ([":first_only"], 1, "its rows could not be measured: no attention was seen in the module"),
        ([":first_only"], 1, "\n\ncorrect: 1 of 3 layers\n"),
        ([":idle_optimizer"], 1, "its rows took no step: no gradient, or lr is 0\n"),
    ],
)
def test_the_exit_code_is_0_if_all_rows_are_shown_to_be_right(
    arguments: list[str], code: int, found: str, capsys: pytest.CaptureFixture[str], mine: str
) -> None:
    assert main(["check", mine + arguments[0], *arguments[1:], "--steps", "1"]) == code
    captured = capsys.readouterr()
    assert found in captured.out
    assert captured.err in ("", "made\n")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["models_to_check:wrongly_declared"], 1, "0: what is declared for WronglyDeclared is wrong here"),
        (["models_to_check:without"], 2, "to run it, name a function that returns a batch too"),
        (["models_to_check:misfit"], 1, "Sequential failed on the sample: RuntimeError: mat1 and mat2"),
        (["models_to_check:missing"], 2, "models_to_check has no 'missing'"),
        (["lama"], 2, "did you mean llama"),
        (["models_to_check:unheard_of", "--growth", "nan"], 2, "--growth must be a positive number, not nan"),
        (["models_to_check:unheard_of", "--tau", "-1"], 2, "--tau must be a positive number, not -1.0"),
        (["gpt2", "--steps", "1.5"], 2, "argument --steps: invalid int value: '1.5'; see quacklr check --help"),
    ],
)
@pytest.mark.usefixtures("mine")
def test_what_gets_no_answer_gets_one_sentence(
    arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == code
    captured = capsys.readouterr()
    err = captured.err.removeprefix("made\n")
    assert (captured.out, len(err.splitlines())) == ("", 1)
    assert err.startswith("quacklr check: ")
    assert sentence in err
