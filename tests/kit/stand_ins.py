"""Imitations of published attention modules, each with its paths written by hand, to test the finder with.

CASES has all of them. stand_ins_kit.py defines a case.
"""

from __future__ import annotations

import stand_ins_latent
import stand_ins_libraries
import stand_ins_modified
import stand_ins_sharing
import stand_ins_stored
import stand_ins_systems
from stand_ins_kit import Case, call

CASES: list[Case] = [
    *stand_ins_systems.CASES,
    *stand_ins_latent.CASES,
    *stand_ins_libraries.CASES,
    *stand_ins_sharing.CASES,
    *stand_ins_modified.CASES,
    *stand_ins_stored.CASES,
]
IDS = [case.name for case in CASES]

__all__ = ["CASES", "IDS", "Case", "call"]
