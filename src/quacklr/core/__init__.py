"""The definition of an attention logit as paths of weights, and the rule for learning rates. Imports only torch."""
