"""Rules and measurements agree on timm's models. Runs in a process with a stand-in for torchvision."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from timm_without_torchvision import stand_in

SCRIPT = """
import json, sys, timm, torch
from quacklr.find.measure.assemble import measured_paths
from quacklr.find.discover import found_by_table
from quacklr.find.finding import differences
from quacklr.util.modules import named_parameters

def outcome_of(ruled, seen, parameters):
    if ruled is None:
        return "not found"
    if ruled.unknown:
        return "measured: " + ("paths" if seen.paths else seen.reason.split(":")[0])
    return differences(ruled.paths, seen.paths, parameters) or ("agree: paths" if ruled.paths else "agree: none")

torch.manual_seed(0)
outcome = {}
for case in sys.argv[1:]:
    name, *options = case.split()
    model = timm.create_model(name, pretrained=False, **dict.fromkeys(options, True))
    ruled, seen = found_by_table(model), measured_paths(model, torch.randn(1, *model.default_cfg["input_size"]))
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    outcome[case] = sorted({outcome_of(ruled.get(module), finding, names) for module, finding in seen.items()})
print(json.dumps(outcome))
"""
EXPECTED = {
    "vit_tiny_patch16_224": ["agree: paths"],
    "deit_tiny_distilled_patch16_224": ["agree: paths"],
    "vit_tiny_patch16_224 qk_norm": ["agree: none"],
    "mobilevit_xxs": ["agree: paths"],
    "tiny_vit_5m_224": ["measured: paths"],  # its class is called Attention too, but each head's q, k, v are together
    "levit_128s": ["measured: QK norm"],  # norms over the batch
}


def test_what_rules_say_of_timms_models_is_what_is_measured_and_others_are_not_guessed(tmp_path: Path) -> None:
    path = os.pathsep.join([str(stand_in(tmp_path)), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", SCRIPT, *EXPECTED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == EXPECTED
