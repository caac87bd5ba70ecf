"""A trained model at work: token after token from its caches, as `quacklr generate` shows it."""
