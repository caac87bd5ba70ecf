"""The rules for rates: the paper's, its ablation, and two that measure the step itself."""
