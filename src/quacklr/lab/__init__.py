"""The paper's experiments: model, data, optimizer, rival methods, logit statistics; small on a laptop, 1B on a cluster.

Needs the packages of the extra `quacklr[lab]`. It uses the library as anybody would, through the names of `quacklr`.
"""
