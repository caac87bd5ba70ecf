"""How the lab's commands turn a dataclass into options: one a field, without prefixes, and a flag only to be set."""

from __future__ import annotations

import tyro

OPTIONS = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
