"""`quacklr inspect` on models whose attention is known, and on names of no model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from model_source import MODELS
from quacklr.cli import main
from timm_without_torchvision import stand_in


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the current directory."""
    (tmp_path / "models_to_inspect.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "models_to_inspect", raising=False)
    return "models_to_inspect"


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What is printed, spaces in a row as one."""
    assert main(["inspect", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.err.removeprefix("made\n") == ""  # a factory that prints
    return "\n".join(" ".join(line.split()) for line in captured.out.splitlines())


EXPECTED = {  # the table and what follows it
    "deepseek_v3": """
model.layers.{0-60}.self_attn by table 128 uq[128] uk[128] + qr[128] kr q_b_proj, kv_b_proj, kv_a_proj_with_mqa
model.layers.{0-60}.self_attn.dq: cut off by the norm on the latent: the logit does not depend on its scale
model.layers.{0-60}.self_attn.dkv: cut off by the norm on the latent: the logit does not depend on its scale
QuacK(model, optimizer) attaches to 61 of 61 attention layers""",
    "jamba": """
model.layers.{4,12,20,28}.self_attn by table 32 q[32] k[8] q_proj, k_proj
QuacK(model, optimizer) attaches to 4 of 4 attention layers""",
    "t5": """
encoder.block.{0-5}.layer.0.SelfAttention by table 8 q[8] k[8] q, k
decoder.block.{0-5}.layer.0.SelfAttention by table 8 q[8] k[8] q, k
decoder.block.{0-5}.layer.1.EncDecAttention by table 8 q[8] k[8] q, k
QuacK(model, optimizer) attaches to 18 of 18 attention layers""",
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_model_type_is_described_from_its_default_config(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in inspected(capsys, kind).splitlines() if line not in ("", "left alone:")]
    assert lines[0].startswith(f"{kind}: ")
    assert lines[0].endswith(", shapes only")
    assert lines[1] == "attention found heads logit weights"
    assert lines[2:] == EXPECTED[kind].strip().splitlines()


def test_a_model_with_nothing_to_control_is_said_to_have_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    text = inspected(capsys, "qwen3", code=1)
    assert "raises: Qwen3ForCausalLM has nothing for QuacK to control in its 32 attention layers" in text
    assert "QK norm" in text


def test_json_has_every_layer(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(inspected(capsys, "deepseek_v3", "--json"))
    assert list(report["layers"]) == [f"model.layers.{i}.self_attn" for i in range(61)]
    at = "model.layers.60.self_attn"
    layer = report["layers"][at]
    assert [(path["heads"], path["scale"]) for path in layer["paths"]] == [(128, pytest.approx(192**-0.5))] * 2
    assert [weight for path in layer["paths"] for weight in path["weights"].items()] == [
        (f"{at}.uq", {"parameter": f"{at}.q_b_proj.weight", "blocks": 128}),
        (f"{at}.uk", {"parameter": f"{at}.kv_b_proj.weight", "blocks": 128}),
        (f"{at}.qr", {"parameter": f"{at}.q_b_proj.weight", "blocks": 128}),
        (f"{at}.kr", {"parameter": f"{at}.kv_a_proj_with_mqa.weight", "blocks": 1}),
    ]
    assert len(report["left_alone"]) == 2 * 61
    assert report["attaches"] is True


def test_a_config_is_a_file_or_a_folder_with_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 48, "num_attention_heads": 3}
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    monkeypatch.chdir(tmp_path)
    for target in ("./bert", "bert/config.json", str(tmp_path / "bert")):
        text = inspected(capsys, target)
        assert f"{target}: BertForMaskedLM, shapes only" in text
        assert "bert.encoder.layer.{0-1}.attention.self by table 3 q[3] k[3]" in text
    assert "encoder.layer.{0-11}" in inspected(capsys, "bert"), "the type, not the folder"


def test_a_batch_measures_the_model(capsys: pytest.CaptureFixture[str], mine: str) -> None:
    text = inspected(capsys, f"{mine}:unheard_of")
    assert "{0-2} measured 2 q[2] k[2] query_stream, kv" in text
    assert text.endswith("QuacK(logit_paths(model, batch), optimizer) attaches to 3 of 3 attention layers")
    text = inspected(capsys, f"{mine}.py:misread", code=1)
    assert "raises: 0: the table for BoastfulAttention is wrong here; it says that a head reads" in text
    assert "raises: Sequential failed on the sample" in inspected(capsys, f"{mine}:unheard_of_misfit", code=1)
    assert "{0-2} declared 4 q[4] k[4] inner.qkv" in inspected(capsys, f"{mine}:declared")


def test_frozen_zero_and_unknown_weights_are_reported(capsys: pytest.CaptureFixture[str], mine: str) -> None:
    text = inspected(capsys, f"{mine}:half_frozen")
    assert "{0-2} by table 2 q[2] k[2]" in text
    assert "0.q: frozen: no rate, counts in its partners' norms" in text
    assert inspected(capsys, f"{mine}:silent").endswith("QuacK(model, optimizer) attaches to 3 of 3 attention layers")
    assert "Linear has no attention that QuacK can control" in inspected(capsys, f"{mine}:without", code=1)
    text = inspected(capsys, f"{mine}:half_known", code=1)
    assert "left alone:\n1: will be measured on the first batch" in text
    assert text.endswith("QuacK(model, optimizer) attaches to 1 of 2 attention layers")


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("GPT-NeoX", "no model type of transformers, "),
        ("GPT-NeoX", "did you mean gpt_neox"),
        ("nonsense", "a folder is ./folder, your model is file.py:factory"),
        ("org/name", "transformers cannot make it (nothing is downloaded): OSError"),
        ("nowhere.at.all:model", "nowhere.at.all cannot be imported: there is no module nowhere"),
        ("nowhere.py:model", "nowhere.py: there is no such file"),
        ("models_to_inspect:missing", "models_to_inspect has no 'missing'"),
        ("models_to_inspect:returns_text", "must return a model, (model, batch) or (model, optimizer, batch), not str"),
        ("other.json", "no_such_type"),
    ],
)
@pytest.mark.usefixtures("mine")
def test_a_name_of_nothing_gets_one_sentence(target: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.json").write_text('{"model_type": "no_such_type"}')
    assert main(["inspect", target]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert (len(captured.err.splitlines()), captured.out) == (1, "")


@pytest.mark.usefixtures("mine")
def test_an_error_of_the_user_keeps_its_traceback_and_a_file_may_import_its_neighbours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RuntimeError, match="the disk is full"):
        main(["inspect", "models_to_inspect:raises"])
    Path("below").mkdir()
    Path("models_to_inspect.py").rename("below/neighbour_to_inspect.py")
    Path("below/imports_a_neighbour.py").write_text("from neighbour_to_inspect import half_frozen")
    assert "attaches to 3 of 3" in inspected(capsys, "below/imports_a_neighbour.py:half_frozen")


def run(*arguments: str, path: str = "", first: str = "pass") -> subprocess.CompletedProcess[str]:
    script = f"import sys; {first}; from quacklr.cli import main; sys.exit(main({['inspect', *arguments]}))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)


def test_one_json_object_is_all_that_is_printed_and_no_other_package_is_needed(mine: str) -> None:
    missing = "; ".join(f"sys.modules[{name!r}] = None" for name in ("transformers", "timm", "tyro", "rich"))
    done = run(f"{mine}:declared", "--json", first=missing)
    assert (done.returncode, done.stderr) == (0, "made\n")
    assert list(json.loads(done.stdout)["layers"]) == ["0", "1", "2"]
    done = run("llama", first=missing)
    assert done.returncode == 2
    assert "transformers cannot be imported (pip install transformers), timm cannot be imported" in done.stderr


def test_a_model_of_timm_is_measured_on_random_images(tmp_path: Path) -> None:
    done = run("vit_tiny_patch16_224", path=str(stand_in(tmp_path)))
    assert (done.returncode, done.stderr) == (0, "")
    row = next(line.split() for line in done.stdout.splitlines() if "blocks." in line)
    assert row[:3] == ["blocks.{0-11}.attn", "verified", "3"]
