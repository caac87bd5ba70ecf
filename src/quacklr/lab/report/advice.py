"""Which method to use: the advice that docs/choosing.md gives.

It is written by hand, for certain verdicts on the comparisons that it relies on. If one of them changes,
`tests/test_readme.py` fails until the line is revised.
"""

from __future__ import annotations

from quacklr.lab.report.choosing import Advice, AdviceTable, Basis

METHODS = AdviceTable(
    ("your case", "use"),
    (
        Advice(
            "you can lower the learning rate",
            "**First a lower learning rate.** With Muon, QuacK had a lower loss at 0.01 than at 0.1, and in MHA QK "
            "norm too. At 0.01, with a larger tau, QuacK still had a lower loss than the default in MLA.",
            (
                Basis("highest rate", ["MHA", "QuacK"], "fails"),
                Basis("highest rate", ["MLA", "QuacK"], "fails"),
                Basis("highest rate", ["MHA", "QK norm"], "fails"),
                Basis("tuned", ["default"]),
            ),
        ),
        Advice(
            "MHA, Muon, the model can change",
            "**QK norm**, or **sigma-Reparam** of all linear layers. QuacK adds nothing to QK norm, and sigma-Reparam "
            "for queries and keys was better than QuacK for them.",
            (
                Basis("f", ["- QK norm"]),
                Basis("sigma-Reparam", ["MHA"]),
                Basis("with QK norm", ["MHA", "- QK norm"], "the same"),
                Basis("with sigma-Reparam", ["MHA", "- sigma-Reparam"], "fails"),
            ),
        ),
        Advice(
            "MHA, Muon, the model must stay as it is",
            "**QuacK**. QuacK for all products of weights was better; you declare these products by hand "
            "(`examples/all_products.py`). QK clip with a threshold of 10 was the same. Compositional Muon at a tenth "
            "of its learning rate had a lower mean; whether it is better is undecided.",
            (
                Basis("e", ["MHA", "- QuacK"]),
                Basis("everywhere", ["MHA"]),
                Basis("d", ["MHA, Muon"], "the same"),
                Basis("compositional Muon"),
            ),
        ),
        Advice(
            "MLA that decodes from latents, without norms on them, Muon, the model can change in training",
            "If the learning rate must be as high as our highest: **QuacK with sigma-Reparam**, that is QuacK for "
            "queries and keys and sigma-Reparam for all other linear layers. It was better than either alone. If each "
            "method has its best learning rate, absorbed QK norm and sigma-Reparam are each the same as **QuacK**, "
            "which does not change the model.",
            (
                Basis("with sigma-Reparam in MLA", ["- sigma-Reparam"]),
                Basis("with sigma-Reparam in MLA", ["- QuacK"]),
                Basis("absorbed QK norm"),
                Basis("tuned", ["absorbed QK norm"], "the same"),
                Basis("tuned", ["sigma-Reparam"], "the same"),
            ),
        ),
        Advice(
            "MLA that decodes from latents, without norms on them, Muon, the model must stay as it is",
            "**QuacK**. QuacK for all products of weights was better; you declare these products by hand.",
            (Basis("g", ["default"]), Basis("everywhere", ["MLA"])),
        ),
        Advice(
            "MLA that caches its keys, without norms on latents, Muon, the model can change",
            "**QuacK with sigma-Reparam** as above, or **QuacK with QK norm**, which was better than either alone. "
            "Declare the paths by hand then, because QuacK skips attention that has QK norm. QK norm alone had about "
            "the mean of QuacK at 0.1, and a lower mean at 0.01 (no verdict).",
            (
                Basis("with sigma-Reparam in MLA", ["- sigma-Reparam"]),
                Basis("with QK norm", ["MLA", "- QK norm"]),
                Basis("with QK norm", ["MLA", "- QuacK"]),
            ),
        ),
        Advice(
            "MLA with norms on its latents, as in DeepSeek, Muon",
            "**QuacK with declared paths** that contain also dq and dkv, the weights before these norms "
            "([how](howto/mla.md)). QuacK has no rates for them by itself. QK norm had a lower mean, without a "
            "verdict ([means](study.md#one-budget-beside-tuned-methods)). With AdamW we have no advice: at 0.03 seeds "
            "differ too much, and at 0.003 QK norm had the lowest mean, without a verdict.",
            (Basis("latent norms", verdict="fails"),),
        ),
        Advice(
            "MHA, AdamW",
            "First a lower learning rate: at 0.003 the default had the mean that AdamW^2 had at 0.03 "
            "([means](../results/budget.md)). Otherwise **AdamW^2**; its logits ended higher than those of QuacK, "
            "most above 100. QuacK was better than the default. With 48 seeds it had the mean of a constant tau.",
            (
                Basis("AdamW^2", ["MHA"]),
                Basis("AdamW", ["default"]),
                Basis("AdamW", ["constant tau"], "undecided"),
            ),
        ),
        Advice(
            "MLA without norms on its latents, AdamW",
            "First a lower learning rate: at 0.003 the default had a lower mean than all methods at 0.03 "
            "([means](../results/budget.md)). Otherwise **QuacK**, or **AdamW^2**, with higher logits. At 0.03 the "
            "means of both are far below that of the default (no verdict), and that of a constant tau is near them.",
            (Basis("AdamW^2", ["MLA"]),),
        ),
    ),
)

ALREADY = AdviceTable(
    ("you use", "what we found"),
    (
        Advice(
            "a constant tau",
            "QuacK was better. In MHA an error in its tau costs less.",
            (Basis("e", ["MHA", "- QuacK"]), Basis("g", ["constant tau"]), Basis("tau")),
        ),
        Advice(
            "QK clip",
            "Try lower thresholds: at the learning rate 0.1 the best was 10 in MHA and 3 in MLA, not 100. With 10, QK "
            "clip was the same as QuacK in MHA. With 3, it was worse than QuacK in MLA.",
            (Basis("d", ["MHA, Muon"], "the same"), Basis("d", ["MLA, Muon"])),
        ),
        Advice(
            "soft-capping",
            "QuacK was better in MHA. MLA was not decided.",
            (Basis("soft-capping", ["MHA"], "fails"),),
        ),
        Advice(
            "Compositional Muon",
            "In MHA its mean was lower than that of QuacK; whether it is better is undecided. In MLA QuacK was better.",
            (Basis("compositional Muon"), Basis("compositional Muon in MLA", verdict="fails")),
        ),
        Advice(
            "per-head Muon",
            "Logits exploded with it too at the highest learning rate. In MLA QuacK was better.",
            (Basis("per-head Muon", ["MLA"], "fails"),),
        ),
    ),
)

CONDITIONS = AdviceTable(
    ("if", "then"),
    (
        Advice(
            "you do not want to tune anything",
            "QK norm and sigma-Reparam have no setting. With QuacK and a Muon whose update is multiplied by "
            "sqrt(max(1, rows / columns)), set tau to 0.1 / lr: this was at most 0.02 worse than the best tau at all "
            "three learning rates. (With a cosine schedule, weight decay or no gradient clipping, 0.3 / lr was better "
            "on the tuning seed.) Do not use this number with another Muon or with AdamW. A budget, "
            "`rule=Budget(0.02)`, is in place of tau. Its mean difference to the best tau, over common seeds, was at "
            "most 0.02, unless latents have norms ([table](study.md#one-budget-beside-tuned-methods)); three seeds are "
            "too few for a verdict. It was not within 0.02 of QK norm everywhere.",
            (
                Basis("tau and learning rate", ["MHA"]),
                Basis("tau and learning rate", ["MLA"]),
                Basis("budget", ["MHA, Muon, lr 0.1", "QK norm"], "fails"),
            ),
        ),
        Advice(
            "you use a cosine schedule or weight decay, or do not clip gradients",
            "QuacK kept its advantage over a constant tau (MLA, Muon). The best tau was 3 in all three cases, not 1.",
            (
                Basis("cosine", ["constant tau"]),
                Basis("weight decay", ["constant tau"]),
                Basis("no clipping", ["constant tau"]),
            ),
        ),
        Advice(
            "your text is natural language",
            "On speeches, the one corpus that we tried, QuacK was better than a constant tau too. The best tau in MLA "
            "was 3.",
            (
                Basis("speeches", ["MHA", "constant tau"]),
                Basis("speeches", ["MLA", "constant tau"]),
            ),
        ),
        Advice(
            "you train longer than 300 steps",
            "From 300 to 3,000 steps the loss of the default fell little, its logits grew, and the loss of QuacK fell "
            "much, so the difference grew (MLA). In both seeds of QK norm, which are too few for a verdict, it ended "
            "below QuacK with the tau of the short runs ([losses](study.md#longer-runs)).",
            (Basis("longer"),),
        ),
        Advice(
            "your model is larger than ours",
            "We do not know. The larger our models, the lower the learning rate at which logits exploded, and the "
            "larger the gain of QuacK over the default (0.3M to 4M parameters; the second may come from a learning "
            "rate that is further above the critical one). With one tau * lr its own largest logit grew with the size "
            "too, and passed 100 at 16M: watch it, and lower tau. The distance to QK norm grew too "
            "([numbers](study.md#size-of-the-model)). The paper's runs with 1B agree on three points: QuacK is stable "
            "where the default is not, a constant tau is worse, QK norm is slightly better in MHA.",
            (
                Basis("size and critical rate"),
                Basis("every size", ["0.3M"]),
                Basis("every size", ["4M"]),
                Basis("size and gain"),
            ),
        ),
    ),
)

TABLES = {"Methods": METHODS, "Already": ALREADY, "Conditions": CONDITIONS}
"""By heading in results/choosing.md."""
