"""`check`: compares the rows of a model with a measurement, and its logits in real steps with the bound."""
