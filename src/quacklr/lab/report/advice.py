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
            "**First a lower learning rate.** With Muon, QuacK and QK norm had a lower loss at 0.01 than at 0.1. There "
            "QuacK, with a larger tau, still had a lower loss than the default.",
            (
                Basis("highest rate", ["MHA", "QuacK"], "fails"),
                Basis("highest rate", ["MLA", "QuacK"], "fails"),
                Basis("tuned", ["default"]),
            ),
        ),
        Advice(
            "MHA, Muon, the model can change",
            "**QK norm**, or **sigma-Reparam** of all linear layers. QuacK adds nothing to QK norm.",
            (
                Basis("f", ["- QK norm"]),
                Basis("sigma-Reparam", ["MHA"]),
                Basis("with QK norm", ["MHA", "- QK norm"], "the same"),
            ),
        ),
        Advice(
            "MHA, Muon, the model must stay as it is",
            "**QuacK**. QuacK for all products of weights was better; you declare these products by hand "
            "(`examples/all_products.py`). Compositional Muon at a tenth of its learning rate was not worse.",
            (Basis("everywhere", ["MHA"]), Basis("compositional Muon")),
        ),
        Advice(
            "MLA that decodes from latents, Muon, the model can change",
            "**Sigma-Reparam** of all linear layers; its weights are plain after training. Absorbed QK norm was not "
            "worse than QuacK at 0.1, and the same at the best learning rates.",
            (
                Basis("sigma-Reparam", ["MLA"]),
                Basis("absorbed QK norm"),
                Basis("tuned", ["absorbed QK norm"], "the same"),
            ),
        ),
        Advice(
            "MLA that decodes from latents, Muon, the model must stay as it is",
            "**QuacK**. QuacK for all products of weights was better; you declare these products by hand "
            "(`examples/all_products.py`).",
            (Basis("g", ["default"]), Basis("everywhere", ["MLA"])),
        ),
        Advice(
            "MLA that caches its keys, Muon, the model can change",
            "**QK norm and QuacK** together. Declare the paths by hand, because QuacK skips attention that has QK "
            "norm.",
            (Basis("with QK norm", ["MLA", "- QK norm"]),),
        ),
        Advice(
            "MLA with norms on its latents, as in DeepSeek, Muon, the model must stay as it is",
            "**QuacK with declared paths** that contain also dq and dkv, the weights before these norms "
            "([how](attach.md#declared)). QuacK does not find these by itself.",
            (Basis("latent norms", verdict="fails"),),
        ),
        Advice(
            "MHA, AdamW",
            "**AdamW^2**: a bound for the step of every linear layer relative to its weight (in the lab "
            "`--method bounded-step`). QuacK was better than the default; whether it is better than a constant tau is "
            "undecided.",
            (
                Basis("AdamW^2", ["MHA"]),
                Basis("AdamW", ["default"]),
                Basis("AdamW", ["constant tau"], "undecided"),
            ),
        ),
        Advice(
            "MLA, AdamW",
            "**QuacK** or **AdamW^2**.",
            (Basis("AdamW^2", ["MLA"]),),
        ),
    ),
)

ALREADY = AdviceTable(
    ("you use", "what we found"),
    (
        Advice(
            "a constant tau",
            "QuacK was better, and an error in its tau costs less.",
            (Basis("e", ["MHA", "- QuacK"]), Basis("g", ["constant tau"]), Basis("tau")),
        ),
        Advice(
            "QK clip",
            "Try a lower threshold: at 0.1 the best was 10 in MHA and 3 in MLA, not 100. In MLA QuacK was better even "
            "so.",
            (Basis("d", ["MHA, Muon"], "undecided"), Basis("d", ["MLA, Muon"])),
        ),
        Advice(
            "soft-capping",
            "QuacK was better.",
            (Basis("soft-capping", ["MHA"], "fails"),),
        ),
        Advice(
            "Compositional Muon",
            "In MHA it was not worse than QuacK. In MLA QuacK was better.",
            (Basis("compositional Muon"), Basis("compositional Muon in MLA", verdict="fails")),
        ),
        Advice(
            "per-head Muon",
            "It does not prevent the explosion. QuacK was better.",
            (Basis("per-head Muon", ["MLA"], "fails"),),
        ),
    ),
)

CONDITIONS = AdviceTable(
    ("if", "then"),
    (
        Advice(
            "you do not want to tune anything",
            "QK norm and sigma-Reparam have no setting. With QuacK and Muon, set tau to 0.1 / lr: this product fitted "
            "all three learning rates. A budget (`budget=0.02`) needs no tau; use it if the latents have no norms.",
            (
                Basis("tau and learning rate", ["MHA"]),
                Basis("tau and learning rate", ["MLA"]),
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
            "The same on speeches, the one corpus that we tried.",
            (
                Basis("speeches", ["MHA", "constant tau"]),
                Basis("speeches", ["MLA", "constant tau"]),
            ),
        ),
        Advice(
            "you train longer than 300 steps",
            "With 3,000 steps, at the learning rate that is too high for it, the default became worse and QuacK "
            "better, so the difference grew (MLA). QK norm was then a little better than QuacK with the tau of the "
            "short runs ([losses](study.md#longer-runs)).",
            (Basis("longer"),),
        ),
        Advice(
            "your model is larger than ours",
            "We do not know. The larger our models, the lower the learning rate at which logits exploded (0.3M to 4M "
            "parameters). QuacK was better than the default at all of these sizes. With one tau * lr its own largest "
            "logit grew with the size too, so watch it, and lower tau if it passes 100. The paper's runs with 1B agree "
            "on three points: QuacK is stable where the default is not, a constant tau is worse, QK norm is slightly "
            "better in MHA.",
            (Basis("size and critical rate"), Basis("every size", ["0.3M"]), Basis("every size", ["4M"])),
        ),
    ),
)

TABLES = {"Methods": METHODS, "Already": ALREADY, "Conditions": CONDITIONS}
"""By heading in results/choosing.md."""
