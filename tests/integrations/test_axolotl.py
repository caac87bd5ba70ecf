"""The plugin for axolotl gives the trainer a callback with the options of the config file.

axolotl itself is not installed, because it pins versions of torch and many others: its base class is a stand-in.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from quacklr.integrations.transformers import QuacKCallback


class BasePlugin:
    """As axolotl's: methods without effect."""

    def get_input_args(self) -> str | None:
        return None


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    base: Any = ModuleType("axolotl.integrations.base")
    base.BasePlugin = BasePlugin
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, "quacklr.integrations.axolotl", raising=False)
    return importlib.import_module("quacklr.integrations.axolotl")


@pytest.mark.parametrize(("given", "rule"), [({"tau": 0.25}, "Paper(tau=0.25)"), (None, "Limit(0.02)")])
def test_the_plugin_adds_the_callback_with_the_options_of_the_config(plugin: Any, given: Any, rule: str) -> None:
    made = plugin.QuacKPlugin()
    module, _, name = made.get_input_args().rpartition(".")
    arguments = getattr(importlib.import_module(module), name)(quack=given)
    (callback,) = made.add_callbacks_post_trainer(SimpleNamespace(quack=arguments.quack), trainer=None)
    assert isinstance(callback, QuacKCallback)
    assert repr(callback._rule) == rule
