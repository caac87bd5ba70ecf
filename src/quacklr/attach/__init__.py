"""Which optimizers QuacK can scale, and the steps they take."""
