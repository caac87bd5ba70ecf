"""Finding the attention of a model by running it on a batch and differentiating its logits."""
