"""A trained model for others: `quacklr export` writes it as transformers reads it, and compares the two."""
