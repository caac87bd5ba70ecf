"""Look inside a model: tiny copies of known architectures, and batches they accept."""
