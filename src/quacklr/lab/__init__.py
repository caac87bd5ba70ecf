"""The paper's experiments: model, data, optimizers, methods, logit statistics, studies; from a laptop to 1B parameters.

Needs the extra `quacklr[lab]`. Models, methods and the logit probe use the public names of the library. The lab also
imports `quacklr.core`, `quacklr.sharded` and `quacklr.util`.
"""
