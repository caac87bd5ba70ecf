"""The paper's experiments: model, data, optimizer, rival methods, logit statistics; small on a laptop, 1B on a cluster.

Needs the packages of the extra `quacklr[lab]`. Models, methods and the probe use the public names of the library. For
sharded tensors, processes, trackers, files and the command line the lab shares modules with the library:
`quacklr.core`, `quacklr.distributed`, `quacklr.integrations` and `quacklr.util`.
"""
