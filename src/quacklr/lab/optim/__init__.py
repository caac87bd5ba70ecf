"""Optimizers of the lab: Muon and AdamW, the recipe that assigns parameters to them, and learning-rate schedules."""

from quacklr.lab.optim.muon import Muon
from quacklr.lab.optim.newton_schulz import orthogonalise
from quacklr.lab.optim.recipe import AdamWRecipe, MuonRecipe, Recipe, optimizers
from quacklr.lab.optim.schedule import WSD, Constant, Cosine, Schedule, factor, set_lr, validate_schedule

__all__ = [
    "WSD",
    "AdamWRecipe",
    "Constant",
    "Cosine",
    "Muon",
    "MuonRecipe",
    "Recipe",
    "Schedule",
    "factor",
    "optimizers",
    "orthogonalise",
    "set_lr",
    "validate_schedule",
]
