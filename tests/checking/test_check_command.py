"""`quacklr check`, as a person types it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from model_source import MODELS
from quacklr.checking.command import parser
from quacklr.cli import main

MORE = """
def with_optimizer():
    model, batch = declared()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batch
def without_attention():
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU()), torch.randn(2, 5, 16)
class FirstOnly(nn.Sequential):
    def forward(self, x): return self[0](x)
def first_only(): return FirstOnly(Declared(), Declared(), Declared()), torch.randn(2, 5, 16)
def idle_optimizer():
    model, batch = declared()
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


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["check", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_exit_code_of_a_model_with_correct_rows(capsys: pytest.CaptureFixture[str], mine: str) -> None:
    code, out, _ = run(capsys, f"{mine}.py:with_optimizer", "--growth", "2", "--tau", "0.5")
    assert code == 0
    assert out.splitlines()[-1].startswith("correct: 3 layers, 12 heads;")


def test_exit_code_of_a_model_with_wrong_rows(capsys: pytest.CaptureFixture[str], mine: str) -> None:
    code, out, err = run(capsys, f"{mine}:wrongly_declared", "--steps", "1")
    assert (code, out) == (1, "")
    assert "quacklr check: 0: what is declared for" in err


def test_exit_code_of_a_model_with_layers_that_do_not_run(capsys: pytest.CaptureFixture[str], mine: str) -> None:
    code, out, _ = run(capsys, f"{mine}:first_only", "--steps", "1")
    assert code == 1
    assert out.count("its rows could not be measured: no attention was seen in the module") == 2
    assert out.splitlines()[-1] == "not shown: 2 of 3 layers"


def test_a_model_without_a_rule_is_measured_on_its_batch(capsys: pytest.CaptureFixture[str], mine: str) -> None:
    code, out, err = run(capsys, f"{mine}:unheard_of", "--steps", "1")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("correct: 3 layers, 6 heads;")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["qwen3"], 2, "to run it, name a function that returns a batch too"),
        (["models_to_check:without_attention"], 1, "attention"),
        (["models_to_check:idle_optimizer"], 1, "every learning rate is 0"),
        (
            ["models_to_check:misfit"],
            1,
            "Sequential failed on the sample: RuntimeError: mat1 and mat2",
        ),
        (["models_to_check:half_frozen"], 2, "to run it, name a function that returns a batch too"),
        (["models_to_check:missing"], 2, "models_to_check has no 'missing'"),
        (["lama"], 2, "did you mean llama"),
        (["gpt2", "--lr", "0"], 2, "argument --lr: must be a positive number, not 0"),
        (["gpt2", "--growth", "nan"], 2, "argument --growth: must be a positive number, not nan"),
        (["gpt2", "--steps", "0"], 2, "argument --steps: must be a whole number from 1 to 10,000, not 0"),
        (["gpt2", "--steps", "1.5"], 2, "argument --steps: invalid count value: '1.5'"),
    ],
)
@pytest.mark.usefixtures("mine")
def test_what_gets_no_answer_gets_one_sentence(
    arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    returned, out, err = run(capsys, *arguments)
    err = "\n".join(line for line in err.splitlines() if line != "made")
    assert (returned, out, len(err.splitlines())) == (code, "", 1)
    assert err.startswith("quacklr check: ")
    assert sentence in err


def test_the_defaults_are_those_in_the_help() -> None:
    options = {action.dest: action for action in parser()._actions}
    for name in ("lr", "tau", "steps", "growth"):
        said = (options[name].help or "").rpartition("(")[2].rstrip(")")
        assert options[name].default == float(said)
