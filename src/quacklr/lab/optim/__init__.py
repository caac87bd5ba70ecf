"""How the lab trains: Muon and AdamW, a recipe that says which parameter gets which, and a schedule for their lr."""

from quacklr.lab.optim.muon import Muon
from quacklr.lab.optim.newton_schulz import orthogonalise
from quacklr.lab.optim.recipe import AdamWRecipe, MuonRecipe, Recipe, optimizers
from quacklr.lab.optim.schedule import WSD, Constant, Cosine, Schedule, check, factor, set_lr

__all__ = [
    "WSD",
    "AdamWRecipe",
    "Constant",
    "Cosine",
    "Muon",
    "MuonRecipe",
    "Recipe",
    "Schedule",
    "check",
    "factor",
    "optimizers",
    "orthogonalise",
    "set_lr",
]
