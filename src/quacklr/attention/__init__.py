"""The attention logits of any model while it runs: statistics, and a clip."""
