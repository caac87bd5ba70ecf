"""What meets other packages; none of it is imported by the core.

QuacK where someone else writes the training loop: a callback for transformers' Trainer, and one for Lightning.
Accelerate needs none: `QuacK(model, optimizer)` takes a prepared optimizer as it is.

What a LogitMonitor measured, to look at: `writers` for TensorBoard and Weights & Biases, `heatmap` for a picture.
"""
