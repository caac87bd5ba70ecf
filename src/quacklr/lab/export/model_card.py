"""The model card of an export: README.md, as the Hugging Face hub shows it, from the files of the run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from quacklr.lab.config import KINDS, Config, kind_of, values_of
from quacklr.lab.files import atomic_write
from quacklr.lab.presets import ATTENTIONS, PRESETS, with_kinds
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.rows import Row
from quacklr.lab.train.trained import Trained

CARD = "README.md"
TEXT = """\
---
{header}
---

# {name}

A decoder with {parameters:,} parameters, trained by the lab of [quacklr](https://pypi.org/project/quacklr/) to study
learning rates of attention weights. It continues text that is like its training text. It was not trained to follow
instructions, and nothing was done about wrong or harmful text.

| | |
|---|---|
{facts}

## Load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # the folder of this file, or the name of the model on the hub
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
tokens = tokenizer("import ", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=20)[0]))
```

The weights are fp32. `quacklr export` has compared the logits of transformers with those of the lab.

## Train it again

    {command}

## Licence

None is stated, because quacklr does not know the licence of the text. To publish the model, add `license:` to the
header of this file.
"""


def write(run: Trained, path: Path, folder: Path, architecture: str) -> None:
    """Write the card to `folder`; `path` is the run's folder."""
    with atomic_write(folder / CARD) as file:
        file.write(card(run, Folder(path), architecture).encode())


def card(run: Trained, folder: Folder, architecture: str) -> str:
    """The text of the card. Losses are those of the exported step."""
    from huggingface_hub import ModelCardData

    header: Any = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["quacklr", kind_of("method", run.config.method), kind_of("attention", run.config.attention)],
    )
    facts = facts_of(run, folder, architecture)
    return TEXT.format(
        header=header.to_yaml(),
        name=folder.path.resolve().name,
        parameters=sum(weight.numel() for weight in run.model.parameters()),
        facts="\n".join(f"| {name} | {value} |" for name, value in facts.items()),
        command=shlex.join(command(run.config)),
    )


def facts_of(run: Trained, folder: Folder, architecture: str) -> dict[str, str]:
    """The rows of the card's table, all from the files of the run."""
    config, about = run.config, folder.environment
    row: Row = next((row for row in folder.rows() if row["step"] == run.step), {"step": run.step})
    named = {field: kind_of(field, getattr(config, field)) for field in KINDS}
    spec = ", ".join(f"{name} {value}" for name, value in values_of(config.shape).items())
    facts = {
        "architecture in transformers": architecture,
        "shape": spec,
        "attention": described(named["attention"], config.attention),
        "method": described(named["method"], config.method),
        "optimizer": described(named["optimizer"], config.optimizer),
        "schedule": described(named["schedule"], config.schedule),
        "text": f"{public(config.training.corpus)} (fingerprint {about.get('corpus')})",
        "tokenizer": f"{run.tokenizer.vocab:,} tokens",
        "step": f"{run.step:,} of {config.training.steps:,}, with {config.training.batch_tokens:,} tokens each",
        "seed": str(config.training.seed),
    }
    for key, name in {"loss": "training loss", "val_loss": "validation loss", "val_bpb": "bits per byte"}.items():
        if row.get(key) is not None:
            facts[name] = f"{row[key]:.4f}"
    packages = about.get("packages") or {}
    facts["trained with"] = f"quacklr {about.get('quacklr')}, torch {packages.get('torch')}, on {about.get('device')}"
    return facts


def described(kind: str, part: Any) -> str:
    """A part of the configuration: its kind, and its options if there are any."""
    options = ", ".join(f"{name} {value}" for name, value in values_of(part).items())
    return f"{kind} ({options})" if options else kind


def command(config: Config) -> list[str]:
    """The words of a `quacklr train` that has this configuration: the kinds, and options that are not the defaults."""
    kinds = {field: kind_of(field, getattr(config, field)) for field in KINDS}
    base = with_kinds(PRESETS["cpu"], ATTENTIONS["cpu"], **kinds)
    words = ["quacklr", "train", *(word for field, kind in kinds.items() for word in (f"--{field}", kind))]
    for field, part in values_of(config).items():
        default = values_of(getattr(base, field))
        for name, value in values_of(part).items():
            if value != default[name]:
                words += option(name.replace("_", "-"), public(value) if name == "corpus" else value)
    return words


def public(corpus: str) -> str:
    """The folder of the text; of an absolute path the last name only, since a card is published."""
    return Path(corpus).name if Path(corpus).is_absolute() else corpus


def option(name: str, value: Any) -> list[str]:
    """The words of one option."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
