"""The paper's model: a Qwen3 decoder whose attention is MHA (or GQA) or MLA, each with its logit paths declared."""

from quacklr.lab.model.attention import Attention
from quacklr.lab.model.decoder import Decoder, FeedForward, build, build_empty
from quacklr.lab.model.spec import MHA, MLA, Shape

__all__ = ["MHA", "MLA", "Attention", "Decoder", "FeedForward", "Shape", "build", "build_empty"]
