"""Training engines that step flat ranges of parameters: where each keeps the ranges. No engine is imported."""
