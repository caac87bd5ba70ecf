"""What an attention logit is made of, and the rule for its learning rates: one process, torch only."""
