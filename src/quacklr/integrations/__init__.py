"""Code for other packages. The core imports one file of it, `proof`, when a picture of a check is to be saved.

QuacK where someone else writes the training loop: a callback for transformers' Trainer, and one for Lightning.
Accelerate needs none: `QuacK(model, optimizer)` takes a prepared optimizer as it is.

What a LogitMonitor measured, to look at: `writers` for TensorBoard and Weights & Biases, `heatmap` for a picture.
"""
