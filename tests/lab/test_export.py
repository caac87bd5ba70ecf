"""An exported run: transformers loads it and computes the same logits."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from exported_runs import GROUPED, LATENT, NEAR, ODD, ROUND, assert_same_logits, config_of
from lab_runs import make_corpus
from quacklr import QuacK, logit_paths
from quacklr.lab.data.command import main as prepare
from quacklr.lab.export import command, transformers_model
from quacklr.lab.export.model_card import command as command_of
from quacklr.lab.export.tokenizer import byte_tokenizer
from quacklr.lab.inference.sample import SamplingParams, sample_tokens
from quacklr.lab.methods import Default, Method, QKNorm, Quack, SigmaReparametrised
from quacklr.lab.model import MHA, MLA, Shape
from quacklr.lab.optim import WSD, AdamWRecipe, MuonRecipe
from quacklr.lab.train.command import parse
from quacklr.lab.train.runner import run
from quacklr.lab.train.trained import open_run

KINDS: dict[str, tuple[Shape, MHA | MLA, Method, str]] = {
    "MHA": (ODD, ROUND, Quack(), "Llama"),
    "GQA": (ODD, GROUPED, Default(), "Llama"),
    "QK norm": (ODD, GROUPED, QKNorm(), "Qwen3"),
    "MLA": (NEAR, LATENT, Default(), "DeepseekV3"),
    "sigma": (ODD, ROUND, SigmaReparametrised(), "Llama"),
    "sigma MLA": (NEAR, LATENT, SigmaReparametrised("qk"), "DeepseekV3"),
}
TEXTS = [
    "plain",
    "  two\tand\n\nlines\r\n do n't , it 's . ",
    "it's \u00fc\u00df\u0100\u00a0x",
    "\u65e5\u672c\U0001f986",
    "",
    "<|endoftext|> </s>",
]
Made = Callable[[str], Path]


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run of each kind, trained when it is first asked for."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def made(kind: str) -> Path:
        run(config_of(corpus, *KINDS[kind][:3]), folder / kind)
        return folder / kind

    return made


@pytest.fixture(scope="module")
def exported(trained: Made, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The export of a run of each kind."""
    folder = tmp_path_factory.mktemp("exports")

    @cache
    def made(kind: str) -> Path:
        assert command.main([str(trained(kind)), "--out", str(folder / kind)]) == 0
        return folder / kind

    return made


def test_the_model_card_has_the_values_of_the_run(trained: Made, exported: Made) -> None:
    card, path = ModelCard.load(exported("MLA") / "README.md"), trained("MLA")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert card.data.tags == ["quacklr", "default", "mla"]
    facts = dict(re.findall(r"^\| (.*?) \| (.*) \|$", card.text, re.MULTILINE))
    row, model = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1]), open_run(path).model
    assert facts["architecture in transformers"] == "DeepseekV3ForCausalLM"
    assert facts["step"] == "12 of 12, with 256 tokens each"
    assert facts["training loss"] == f"{row['loss']:.4f}"
    assert facts["validation loss"] == f"{json.loads((path / 'result.json').read_text())['val_loss']:.4f}"
    assert f"{sum(weight.numel() for weight in model.parameters()):,} parameters" in card.text
    assert str(path.parent) not in card.text  # a card is published


def test_the_code_in_a_model_card_runs(exported: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(exported("MHA"))
    (code,) = re.findall(r"```python\n(.*?)```", (exported("MHA") / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "card", "exec"), names)
    assert names["model"].config.quacklr["method"] == "quack"


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_in_a_model_card_gives_the_same_configuration(kind: str) -> None:
    config = config_of(Path("corpora/mine"), *KINDS[kind][:3])
    for schedule in (config.schedule, WSD(warmup=3, decay=5)):
        changed = replace(config, schedule=schedule, optimizer=MuonRecipe(nesterov=False, betas=(0.5, 0.6)))
        for each in (changed, replace(changed, optimizer=AdamWRecipe(lr=0.5))):
            words = command_of(each)
            assert words[:2] == ["quacklr", "train"]
            assert parse(words[2:])[0] == each
    away = replace(config, training=replace(config.training, corpus="/home/me/mine"))
    assert parse(command_of(away)[2:])[0].training.corpus == "mine"


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_the_same_logits(trained: Made, exported: Made, kind: str) -> None:
    twin = assert_same_logits(exported(kind), trained(kind))
    assert type(twin).__name__ == f"{KINDS[kind][3]}ForCausalLM"
    gains = [param for param in twin.parameters() if param.ndim == 1]
    assert min(float((gain.detach() - 1).abs().max()) for gain in gains) > 0.05
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert {param.dtype for param in twin.parameters()} == {torch.float32}


def test_the_converted_model_shares_our_tensors_so_that_memory_is_not_doubled(trained: Made) -> None:
    ours = open_run(trained("GQA"))
    twin = transformers_model.convert(ours.model, ours.config, end=0)
    places = {weight.data_ptr() for weight in ours.model.parameters()}
    assert {weight.data_ptr() for weight in twin.parameters()} == places
    assert not any(weight.requires_grad for weight in ours.model.parameters())


@pytest.mark.parametrize("kind", ["GQA", "QK norm", "MLA"])
def test_transformers_generates_the_same_tokens(trained: Made, exported: Made, kind: str) -> None:
    prompt = [*b"the cat s"]
    ours = list(sample_tokens(open_run(trained(kind)).model, prompt, 20, SamplingParams(temperature=0).sampler()))
    twin: Any = AutoModelForCausalLM.from_pretrained(exported(kind))
    theirs = twin.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert theirs[0, len(prompt) :].tolist() == ours
    assert len(set(ours)) > 2


@pytest.mark.parametrize("kind", ["MHA", "QK norm", "MLA"])
def test_the_tokens_of_a_text_are_its_bytes(exported: Made, kind: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported(kind))
    for text in TEXTS:
        assert tokenizer(text).input_ids == [*text.encode()]
        assert tokenizer.decode([*text.encode()]) == text
    every = "".join(map(chr, range(1, 0x250))) * 2
    assert tokenizer(every).input_ids == [*every.encode()]
    assert tokenizer("a\0b").input_ids == [*b"ab"]
    assert (tokenizer.eos_token, tokenizer.eos_token_id, len(tokenizer)) == ("<|endoftext|>", 0, 256)
    assert tokenizer.decode([*b"the end", 0], skip_special_tokens=True) == "the end"
    assert (tokenizer.model_max_length, tokenizer.clean_up_tokenization_spaces) == (32, False)
    config = AutoConfig.from_pretrained(exported(kind))
    assert (config.eos_token_id, config.bos_token_id, tokenizer.bos_token_id) == (0, 0, 0)
    assert GenerationConfig.from_pretrained(exported(kind)).eos_token_id == 0


def test_a_tokenizer_json_is_exported_without_what_it_would_add(tmp_path: Path) -> None:
    make_corpus(tmp_path)
    source = [str(tmp_path / "source.jsonl"), "--val", "0.1", "--probe", "0.1"]
    assert prepare([*source, "--tokenizer", "train:300", "--out", str(tmp_path / "first")]) == 0
    theirs = Tokenizer.from_file(str(tmp_path / "first/tokenizer.json"))
    theirs.add_special_tokens(["<s>", "<bye>"])
    begin, end = theirs.token_to_id("<s>"), theirs.token_to_id("<bye>")
    theirs.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", begin)])
    theirs.enable_truncation(4)
    theirs.enable_padding(length=40)
    theirs.save(str(tmp_path / "tokenizer.json"))
    other = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--end-token", "<bye>"]
    assert prepare([*source, *other, "--out", str(tmp_path / "words")]) == 0
    run(config_of(tmp_path / "words", ODD, ROUND, Default()), tmp_path / "run")
    assert command.main([str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    twin = assert_same_logits(tmp_path / "out", tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.eos_token_id, twin.config.eos_token_id, twin.generation_config.eos_token_id) == (end,) * 3
    assert end == 301 < twin.config.vocab_size == len(tokenizer) == 302
    assert Tokenizer.from_file(str(tmp_path / "out/tokenizer.json")).truncation is None
    theirs.no_truncation()
    theirs.no_padding()
    theirs.encode_special_tokens = True
    for text in [*TEXTS, "the cat sat on the mat and then it ran <s><bye>"]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert tokenizer(text).input_ids == ids
        assert tokenizer.decode(ids) == text


def test_the_folder_is_what_others_expect_of_a_checkpoint(exported: Made) -> None:
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    names |= {"README.md"}  # the model card
    assert {path.name for path in exported("MLA").iterdir()} == names
    assert len({path.stat().st_mode for path in exported("MLA").iterdir()}) == 1
    written = json.loads((exported("MLA") / "config.json").read_text())
    wanted = {"rope_interleave": True, "rope_theta": 50.0, "max_position_embeddings": 32, "vocab_size": 259}
    wanted |= {"first_k_dense_replace": 2, "num_nextn_predict_layers": 0, "tie_word_embeddings": True}
    assert {name: written[name] for name in wanted} == wanted
    generation = json.loads((exported("MLA") / "generation_config.json").read_text())
    assert (generation["max_length"], generation["suppress_tokens"]) == (32, [256, 257, 258])
    tokenizer = json.loads((exported("MLA") / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast", "which transformers 4 knows too"
    with safe_open(exported("MLA") / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - it is no dictionary


@pytest.mark.parametrize(("kind", "first"), [("GQA", "q"), ("MLA", "uq")])
def test_an_exported_model_trains_on_with_quack(exported: Made, kind: str, first: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(exported(kind))
    assert logit_paths(model)[0].weights[0].name == f"model.layers.0.self_attn.{first}"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    quack = QuacK(model, optimizer)
    tokens, losses = torch.tensor([[*b"the cat sat on the mat"]]), []
    for _ in range(3):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[1] < losses[0]
    assert len(quack.rates()) == (4 if kind == "GQA" else 8)


def test_one_line_says_how_well_they_agree_and_one_how_to_use_it(
    trained: Made, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    warnings = BufferingHandler(100)
    logging.getLogger("transformers").addHandler(warnings)
    path = str(trained("MHA"))  # which talks if it is the first to ask
    capfd.readouterr()
    assert command.main([path, "--out", str(tmp_path / "new/out")]) == 0
    said, complaints = capfd.readouterr()
    logging.getLogger("transformers").removeHandler(warnings)
    first, second = said.splitlines()
    assert first.startswith(f"{trained('MHA')} as LlamaForCausalLM: {tmp_path}/new/out (logits of up to ")
    assert second == f'import transformers; transformers.pipeline("text-generation", "{tmp_path}/new/out")("The ")'
    assert (complaints, warnings.buffer) == ("", [])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def test_a_model_that_is_sensitive_to_rounding_is_exported(corpus: Path, tmp_path: Path) -> None:
    """Large attention logits: no tolerance that is right for other models would do."""
    shape = Shape(d_model=64, layers=10, d_ff=64, context=64, init_std=1.0)
    config = config_of(corpus, shape, MHA(heads=2, kv_heads=2, head_dim=32), Default(), steps=5)
    run(replace(config, optimizer=MuonRecipe(lr=1e-9, rest_lr=1e-9)), tmp_path / "run")
    assert command.main([str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    tokens = torch.randint(0, 256, (3, 64), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        logits = open_run(tmp_path / "run").model(tokens)
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits
    assert 5e-5 < float((logits - expected).abs().max() / logits.abs().max()) < 1e-2


@pytest.mark.parametrize(
    "wrong", [{"rope_parameters": {"rope_type": "default", "rope_theta": 51.0}}, {"rms_norm_eps": 0.0101}]
)
def test_an_export_with_other_logits_is_removed(
    trained: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    right = transformers_model.settings
    monkeypatch.setattr(transformers_model, "settings", lambda config, end: right(config, end) | wrong)
    with pytest.raises(RuntimeError, match="LlamaForCausalLM differs by"):
        command.main([str(trained("MHA")), "--out", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []


def test_an_export_with_another_tokenizer_is_removed(
    trained: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = byte_tokenizer()
    wrong.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    monkeypatch.setattr("quacklr.lab.export.tokenizer.byte_tokenizer", lambda: wrong)
    with pytest.raises(RuntimeError, match="transformers reads .Two  spaces"):
        command.main([str(trained("MHA")), "--out", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []


def test_qk_norm_and_latents_do_not_need_heads_that_divide_the_width(corpus: Path, tmp_path: Path) -> None:
    three = MHA(heads=3, kv_heads=1, head_dim=8)
    run(config_of(corpus, ODD, three, QKNorm()), tmp_path / "run")
    assert command.main([str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    assert_same_logits(tmp_path / "out", tmp_path / "run")
