"""`quacklr inspect` on models whose attention is known, and on names of no model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from model_source import MODELS
from quacklr.cli import main
from quacklr.inspect import from_timm
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
    assert captured.err == ""
    return "\n".join(" ".join(line.split()) for line in captured.out.splitlines())


EXPECTED = {  # the beginnings of some of the lines
    "llama": """
model.layers.{0-31}.self_attn (32) LlamaAttention separate q, k 32/32/128 q[32] k[32] 0.08839 q ~ 1/|k|
QuacK(model, optimizer) attaches to 32 attention layers, 1.07 billion parameters (15.9 % of all)""",
    "deepseek_v3": """
model.layers.{0-60}.self_attn (61) DeepseekV3Attention MLA, low-rank queries 128/128/128+64 uq[128] uk[128] 0.07217 uq
+ qr[128] kr uk ~ 1/|uq|
qr ~ 1/|kr|
kr ~ 1/max|qr|
model.layers.{0-60}.self_attn.dq (61): cut off by the norm on the latent
model.layers.{0-60}.self_attn.dkv (61): cut off by the norm on the latent""",
    "gpt2": """
transformer.h.{0-11}.attn (12) GPT2Attention fused [q|k|v] 12/12/64 q[12] k[12] 0.125 q ~ 1/|k|""",
    "qwen3": """
model.layers.{0-31}.self_attn (32): QK norm: its logit does not depend on
QuacK(model, optimizer) would raise: it has nothing to control, since all of its 32 attention layers are left alone""",
    "jamba": """
model.layers.{4,12,20,28}.self_attn (4) JambaAttention separate q, k 32/8/128 q[32] k[8] 0.08839 q ~ 1/|k|
k ~ 1/max|q|""",
    "bart": """
decoder.layers.{0-11}.encoder_attn (12) BartAttention separate q, k 16/16/64 q[16] k[16] 0.125 q ~ 1/|k|
encoder.layers.{0-11}.self_attn (12) BartAttention separate q, k 16/16/64 q[16] k[16] 0.125 q ~ 1/|k|""",
    "t5": """
encoder.block.{0-5}.layer.0.SelfAttention (6) T5Attention separate q, k 8/8/64 q[8] k[8] 1 q ~ 1/|k|
decoder.block.{0-5}.layer.1.EncDecAttention (6) T5Attention separate q, k 8/8/64 q[8] k[8] 1 q ~ 1/|k|""",
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_model_type_is_described_from_its_default_config(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n" + inspected(capsys, kind)
    assert [line for line in EXPECTED[kind].strip().splitlines() if f"\n{line}" not in text] == []


def weights(layer: dict[str, Any]) -> dict[str, tuple[str, int, list[list[list[int]]]]]:
    return {w["role"]: (w["parameter"], w["dim"], w["rows"]) for path in layer["paths"] for w in path["weights"]}


def blocks(count: int, period: int, start: int, size: int) -> list[list[list[int]]]:
    return [[[h * period + start, h * period + start + size]] for h in range(count)]


def test_json_has_every_row_of_llama(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(inspected(capsys, "llama", "--measure", "--json"))
    assert [layer["module"] for layer in report["layers"]] == [f"model.layers.{i}.self_attn" for i in range(32)]
    layer = report["layers"][7]
    assert [layer[key] for key in ("class", "heads", "groups", "head_dim")] == ["LlamaAttention", 32, 32, 128]
    q, k = (f"model.layers.7.self_attn.{name}_proj.weight" for name in "qk")
    assert weights(layer) == {"q": (q, 0, blocks(32, 128, 0, 128)), "k": (k, 0, blocks(32, 128, 0, 128))}
    assert layer["agrees"] is True
    assert [path["scale"] for path in layer["paths"]] == [128**-0.5]
    assert (report["left_alone"], report["controlled"], report["parameters"]) == ({}, 32 * 2 * 4096**2, 6738415616)
    assert report["measured_on"] == "a small model of the same kind"
    assert len(report["small"]) == 2


def test_json_has_every_row_of_deepseek(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(inspected(capsys, "deepseek_v3", "--json"))
    layer = report["layers"][60]
    at = "model.layers.60.self_attn."
    assert [layer[key] for key in ("heads", "groups", "head_dim", "agrees")] == [128, 128, 192, None]
    assert weights(layer) == {
        "uq": (f"{at}q_b_proj.weight", 0, blocks(128, 192, 0, 128)),
        "uk": (f"{at}kv_b_proj.weight", 0, blocks(128, 256, 0, 128)),
        "qr": (f"{at}q_b_proj.weight", 0, blocks(128, 192, 128, 64)),
        "kr": (f"{at}kv_a_proj_with_mqa.weight", 0, [[[512, 576]]]),
    }
    assert set(layer["left_alone"]) == {f"{at}dq", f"{at}dkv"}
    assert len(report["left_alone"]) == 2 * 61


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "jamba", "qwen3"])
def test_a_small_model_of_the_kind_is_measured(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = inspected(capsys, kind, "--measure")
    assert "measured on a small model of the same kind" in text
    assert text.count("agrees") == 1
    assert "differs" not in text


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
        assert "bert.encoder.layer.{0-1}.attention.self (2) BertSelfAttention separate q, k 3/3/16" in text
    assert main(["inspect", "bert"]) == 2
    assert "is a type of transformers and a folder here; write ./bert for the folder" in capsys.readouterr().err


def test_a_rule_that_a_measurement_contradicts_is_shown_with_it(capsys: pytest.CaptureFixture[str], mine: str) -> None:
    assert "{0-2} (3) BoastfulAttention separate q, k 4/4/4" in inspected(capsys, f"{mine}:misread")
    text = inspected(capsys, f"{mine}.py:misread", "--measure", code=1)
    assert "{0-2} (3): separate q, k: it says that a head reads k_proj.weight[0:4] and q_proj.weight[0:4], but" in text
    assert "the measurement says that a head reads k_proj.weight[0:8] and q_proj.weight[0:8]" in text
    assert "but a rule differs from what was measured" in text
    layers = json.loads(inspected(capsys, f"{mine}:misread", "--measure", "--json", code=1))["layers"]
    assert [layer["agrees"] for layer in layers] == [False] * 3
    assert weights({"paths": layers[1]["measured_paths"]})["k"] == ("1.k_proj.weight", 0, blocks(2, 8, 0, 8))


def test_an_attention_that_no_rule_knows_is_found_by_measuring(capsys: pytest.CaptureFixture[str], mine: str) -> None:
    text = inspected(capsys, f"{mine}:unheard_of", code=1)
    assert "not recognised" in text
    assert text.endswith("add --measure")
    text = inspected(capsys, f"{mine}:unheard_of", "--measure")
    assert "add --measure" not in text
    assert "{0-2} (3) UnheardOfAttention separate q, [k|v] 2/2/8 q[2] k[2] 1/sqrt(8) q ~ 1/|k|" in text
    assert "QuacK(logit_paths(model, batch), optimizer) attaches to 3 attention layers" in text


def test_what_a_module_declares_is_checked_too(capsys: pytest.CaptureFixture[str], mine: str) -> None:
    assert main(["inspect", f"{mine}:declared", "--measure", "--json"]) == 0
    captured = capsys.readouterr()
    assert [layer["agrees"] for layer in json.loads(captured.out)["layers"]] == [True] * 3
    assert captured.err == "made\n"
    text = inspected(capsys, f"{mine}:wrongly_declared", "--measure", code=1)
    assert "by rule fused per head [q,v,k], measured fused per head [q,k,v]" in text


def test_what_is_measured_within_one_declaration_is_compared_with_all_of_it(
    capsys: pytest.CaptureFixture[str], mine: str
) -> None:
    layers = json.loads(inspected(capsys, f"{mine}:declared_together", "--measure", "--json"))["layers"]
    assert [(layer["module"], len(layer["paths"]), layer["agrees"]) for layer in layers] == [("", 2, True)]


def test_json_has_the_outcome_of_measuring_and_which_weights_are_frozen(
    capsys: pytest.CaptureFixture[str], mine: str
) -> None:
    layers = json.loads(inspected(capsys, f"{mine}:first_only", "--measure", "--json"))["layers"]
    assert [layer["measured"] for layer in layers] == ["agrees", "not seen", "not seen"]
    layers = json.loads(inspected(capsys, f"{mine}:half_frozen", "--json"))["layers"]
    assert [layer["measured"] for layer in layers] == [None] * 3
    frozen = [{weight["frozen"] for path in layer["paths"] for weight in path["weights"]} for layer in layers]
    assert frozen == [{True}, {False}, {False}]


def test_a_layer_that_did_not_run_is_not_said_to_agree(capsys: pytest.CaptureFixture[str], mine: str) -> None:
    text = inspected(capsys, f"{mine}:first_only", "--measure").splitlines()
    rows = [line for line in text if " Declared fused per head [q,k,v] 4/4/4 " in line]
    assert [row.split(" Declared")[0] for row in rows] == ["0", "{1-2} (2)"]
    assert [row.endswith(" agrees") for row in rows] == [True, False]


def test_frozen_and_zero_weights_are_reported(capsys: pytest.CaptureFixture[str], mine: str) -> None:
    text = inspected(capsys, f"{mine}:half_frozen")
    assert "0 MultiheadAttention fused [q|k|v], and bias_k 2/2/8 q[2] k[2] 1/sqrt(8) q has none" in text
    assert (
        "{1-2} (2) MultiheadAttention fused [q|k|v], and bias_k 2/2/8 q[2] k[2] 1/sqrt(8) q ~ 1/max(|k|, |bias_k|)"
        in text
    )
    assert "0.q: frozen: no rate, counts in its partners' norms" in text
    assert "attaches to 2 attention layers" in text
    text = inspected(capsys, f"{mine}:silent", code=1)
    assert "QuacK(model, optimizer) would raise: 1.q: its partner 1.k is all zeros" in text
    assert "Linear has no attention that QuacK can control" in inspected(capsys, f"{mine}:without", code=1)
    text = inspected(capsys, f"{mine}:misfit", "--measure", code=1)
    assert "not measured: Sequential failed on the sample" in text


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("lama", "no model type of transformers, "),
        ("lama", "did you mean llama"),
        ("GPT-NeoX", "did you mean gpt_neox"),
        ("org/name", "not in the local cache of the hub"),
        ("nowhere.at.all:model", "nowhere.at.all cannot be imported: there is no module nowhere"),
        ("nowhere.py:model", "nowhere.py: there is no such file"),
        ("models_to_inspect:missing", "models_to_inspect has no 'missing'"),
        ("models_to_inspect:torch", "is a module, not a function that returns a model"),
        ("models_to_inspect:raises", "raised RuntimeError: the disk is full (models_to_inspect.py:"),
        ("models_to_inspect:returns_text", "must return a model, (model, batch) or (model, optimizer, batch), not"),
        ("models_to_inspect:half_frozen", "return a batch with the model: return model, batch"),
        ("models_to_inspect.py", "a file is a config.json, or Python with a factory: file.py:factory"),
        ("broken.json", "is not JSON that can be read"),
        ("other.json", "this version of transformers has no model_type 'no_such_type'"),
        ("siglip_text_model", "is a part of other models, and has none of its own"),
    ],
)
@pytest.mark.usefixtures("mine")
def test_a_name_of_nothing_gets_one_sentence(target: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.json").write_text("{")
    Path("other.json").write_text('{"model_type": "no_such_type"}')
    assert main(["inspect", target, "--measure"]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert (len(captured.err.splitlines()), captured.out) == (1, "")


@pytest.mark.usefixtures("mine")
def test_a_file_of_another_folder_may_import_its_neighbours(capsys: pytest.CaptureFixture[str]) -> None:
    Path("below").mkdir()
    Path("models_to_inspect.py").rename("below/neighbour_to_inspect.py")
    Path("below/imports_a_neighbour.py").write_text("from neighbour_to_inspect import half_frozen")
    assert "attaches to 2 attention layers" in inspected(capsys, "below/imports_a_neighbour.py:half_frozen")


def test_a_name_that_no_file_can_have_is_one_short_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "x" * 1000]) == 2
    assert capsys.readouterr().err == f"quacklr inspect: cannot read or write {'x' * 100}...: File name too long\n"


def test_what_timm_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    assert from_timm.unavailable() == "it is not installed: pip install timm"
    (tmp_path / "timm.py").write_text("import a_package_that_is_missing")
    monkeypatch.delitem(sys.modules, "timm")
    monkeypatch.syspath_prepend(tmp_path)
    assert from_timm.unavailable() == "it needs a_package_that_is_missing: pip install a_package_that_is_missing"


def run(*arguments: str, path: str = "", first: str = "pass") -> subprocess.CompletedProcess[str]:
    script = f"import sys; {first}; from quacklr.cli import main; sys.exit(main({['inspect', *arguments]}))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)


def test_one_json_object_is_all_that_is_printed_and_no_package_of_the_lab_is_needed(mine: str) -> None:
    missing = "; ".join(f"sys.modules[{name!r}] = None" for name in ("transformers", "timm", "tyro", "rich"))
    done = run(f"{mine}:declared", "--json", first=missing)
    assert (done.returncode, done.stderr) == (0, "made\n")
    assert json.loads(done.stdout)["summary"].startswith("QuacK(model, optimizer) attaches to 3 attention layers")
    done = run("llama", first=missing)
    assert done.returncode == 2
    assert "transformers is not installed (pip install transformers), timm cannot be imported" in done.stderr


def test_a_model_of_timm_is_measured_as_it_is(tmp_path: Path) -> None:
    done = run("vit_tiny_patch16_224", "--measure", "--json", path=str(stand_in(tmp_path)))
    assert (done.returncode, done.stderr) == (0, "")
    layer = json.loads(done.stdout)["layers"][11]
    assert (layer["module"], layer["agrees"]) == ("blocks.11.attn", True)
    assert weights(layer)["k"] == ("blocks.11.attn.qkv.weight", 0, blocks(3, 64, 192, 64))
