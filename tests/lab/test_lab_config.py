"""Configurations: the paper's sizes, what contradicts itself, and the way from options to a run's file and back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from quacklr.lab.config import KINDS, Config, differences, fingerprint, from_json, to_json
from quacklr.lab.data import open_corpus
from quacklr.lab.errors import UserError
from quacklr.lab.methods import QKNorm, Quack, alter
from quacklr.lab.model import MHA, MLA, Decoder
from quacklr.lab.optim import AdamWRecipe, Cosine
from quacklr.lab.presets import ATTENTIONS, PRESETS, with_kinds
from quacklr.lab.train.command import main, parse


def size(config: Config) -> int:
    with torch.device("meta"):
        model = Decoder(replace(config.shape, vocab=config.shape.vocab or 256), config.attention)
        alter(config.method, model)
    return sum(param.numel() for param in model.parameters())


def test_the_presets_have_the_papers_sizes() -> None:
    assert size(PRESETS["paper-mha"]) == 1_040_246_784
    assert size(replace(PRESETS["paper-mha"], method=QKNorm())) == 1_040_248_576
    assert size(PRESETS["paper-mla"]) == 931_981_312
    assert round(size(PRESETS["100m"]) / 1e6, 1) == 102.6
    assert 1_000_000 < size(PRESETS["cpu"]) < 1_100_000


@pytest.mark.parametrize("preset", ["paper-mha", "paper-mla"])
def test_the_paper_presets_train_as_the_paper_says(preset: str) -> None:
    config = PRESETS[preset]
    assert (config.sequences, config.shape.context) == (96, 2048)
    assert config.training.batch_tokens == 196_608
    assert (config.training.steps, config.schedule.warmup) == (5000, 500)
    assert to_json(config)["optimizer"]["kind"] == "muon"
    assert to_json(config)["schedule"]["kind"] == "constant"
    assert config.machine.precision == "bf16"


def test_mla_of_the_paper_is_named_by_either_preset() -> None:
    config, _ = parse(["--preset", "paper-mha", "--attention", "mla"])
    assert config.attention == PRESETS["paper-mla"].attention == MLA(32, 64, 64, 64, 512, 256)


@pytest.mark.parametrize("name", [(field, kind) for field, kinds in KINDS.items() for kind in kinds], ids="-".join)
def test_a_configuration_survives_its_file(name: tuple[str, str]) -> None:
    field, kind = name
    base = PRESETS["paper-mla" if kind == "absorbed-qk-norm" else "cpu"]
    config = with_kinds(base, ATTENTIONS["cpu"], **{field: kind})
    assert isinstance(getattr(config, field), KINDS[field][kind])
    again = from_json(json.loads(json.dumps(to_json(config))))
    assert again == config
    assert fingerprint(again) == fingerprint(config)


def test_a_file_of_another_version_is_refused_in_a_sentence() -> None:
    saved = to_json(PRESETS["cpu"])
    saved["shape"] = {**saved["shape"], "wings": 2}
    with pytest.raises(UserError, match=r"does not fit this version of quacklr.*wings"):
        from_json(saved)


def test_options_become_the_configuration() -> None:
    words = (
        "--method quack --tau 0.1 --attention mla --lr 3e-2 --optimizer adamw --schedule cosine --steps 77 --warmup 7"
    )
    config, place = parse([*words.split(), "--latent-norm", "--seed=5", "--out", "there"])
    assert config.method == Quack(tau=0.1)
    assert config.attention == replace(MLA(), latent_norm=True)
    assert config.optimizer == AdamWRecipe(lr=3e-2)
    assert config.schedule == Cosine(warmup=7)
    assert (config.training.steps, config.training.seed, str(place.out)) == (77, 5, "there")


def test_the_fingerprint_is_of_what_decides_the_numbers() -> None:
    config = PRESETS["cpu"]
    same = replace(config, watch=replace(config.watch, keep=9, checkpoint_every=7))
    assert fingerprint(same) == fingerprint(config)
    for other in (replace(config, training=replace(config.training, seed=1)), replace(config, method=Quack())):
        assert fingerprint(other) != fingerprint(config)


def test_differences_are_told_as_options() -> None:
    other, _ = parse(["--lr", "0.2", "--method", "quack"])
    assert differences(PRESETS["cpu"], other) == [
        "--floor (None there, 0.0 here)",
        "--literal (None there, False here)",
        "--lr (0.1 there, 0.2 here)",
        "--method (default there, quack here)",
        "--norm (None there, frobenius here)",
        "--products (None there, logits here)",
        "--tau (None there, 1.0 here)",
        "--together (None there, nothing here)",
    ]


@pytest.mark.usefixtures("stdlib")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--batch-tokens 1000", "--batch-tokens 1000 is not a multiple of the 1024 tokens of a micro-batch"),
        ("--warmup 301", "--warmup 301"),
        ("--schedule wsd --decay 290", "--decay 290"),
        ("--method muon-split --optimizer adamw", "--method muon-split is a way to use Muon"),
        ("--method compositional-muon --optimizer adamw", "--method compositional-muon is a way to use Muon"),
        ("--method compositional-muon --parallel fsdp", "--method compositional-muon needs whole matrices"),
        ("--method bounded-step --parallel fsdp", "--method bounded-step needs whole matrices"),
        ("--method quack --literal", "--literal is about norms on latents, so it needs --attention mla --latent-norm"),
        ("--tau 2", "--tau means nothing with --method default; it goes with --method quack or --method constant-tau"),
        ("--kv-heads=2 --attention mla", "--kv-heads means nothing with --attention mla; it goes with --attention mha"),
        ("--momentum 0.9 --optimizer adamw", "--momentum means nothing with --optimizer adamw"),
        ("--kv-heads 3", "--kv-heads 3 does not divide --heads 4"),
        ("--lr -1", "--lr must be"),
        ("--lr nan", "--lr must be"),
        ("--method quack --tau 0", "--tau must be a positive number, not 0"),
        ("--steps 0 --warmup 0", "--steps must be a positive number, not 0"),
        ("--grad-clip -1", "--grad-clip must be 0 or a positive number, not -1"),
        ("--threads 0", "--threads must be a positive number, not 0"),
        ("--keep 0", "--keep must be a positive number, not 0"),
        ("--device tpu7", "--device tpu7 cannot be used here"),
        ("--device meta", "--device meta cannot be used here"),
        ("--vocab 200", "--vocab 200 is less than the 256 tokens of stdlib"),
        ("--corpus nowhere", "nowhere does not exist"),
        ("--resume nowhere", "nowhere does not exist"),
    ],
)
def test_what_contradicts_itself_is_one_sentence_and_exit_code_2(
    options: str, sentence: str, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    open_corpus("stdlib")
    capsys.readouterr()
    out = [] if "--resume" in options else ["--out", f"{tmp_path}/run"]
    assert main([*options.split(), *out]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.startswith("quacklr train: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("options", ["--method quac", "--lr x", "--stepps 3", "--method", "nonsense"])
def test_a_mistyped_option_is_exit_code_2(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options.split()) == 2
    assert "quacklr train --help" in capsys.readouterr().err


def test_help_shows_the_options_of_the_chosen_kinds_and_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--method", "quack", "--attention", "mla", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in (
        "--preset",
        "--tau",
        "--d-ckv",
        "--lr",
        "--warmup",
        "--corpus",
        "--out",
        "--resume",
        "--probe-every",
    ):
        assert option in shown
    for option in ("--threshold", "--kv-heads", "--decay", "--cap"):
        assert option not in shown


def test_the_default_attention_of_a_preset_is_its_own() -> None:
    assert PRESETS["cpu"].attention == ATTENTIONS["cpu"]["mha"] == MHA()
