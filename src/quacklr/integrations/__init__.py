"""QuacK and LogitMonitor with other packages.

`transformers` and `lightning` have a callback for the package's Trainer. Accelerate needs none:
`QuacK(model, optimizer)` accepts a prepared optimizer. `writers` sends the statistics of a LogitMonitor to
TensorBoard and Weights & Biases.
"""
