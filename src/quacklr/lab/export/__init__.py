"""`quacklr export`: a trained model as a checkpoint of transformers, whose logits are compared with ours."""
