"""QuacK where someone else writes the training loop: a callback for transformers' Trainer, and one for Lightning.

Neither is imported by the core. Accelerate needs none: `QuacK(model, optimizer)` takes a prepared optimizer as it is.
"""
