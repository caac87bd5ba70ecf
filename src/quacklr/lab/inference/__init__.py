"""Text generation with a trained model: sampling, and `quacklr generate`."""
