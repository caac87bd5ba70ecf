"""What people call the parts of an attention."""

from __future__ import annotations

QUERY_AND_KEY = (
    ("q_proj", "k_proj"),
    ("query", "key"),
    ("q", "k"),
    ("wq", "wk"),
    ("Wq", "Wk"),
    ("w_q", "w_k"),
    ("W_q", "W_k"),
    ("W_Q", "W_K"),
    ("c_q", "c_k"),
    ("to_q", "to_k"),
    ("q_lin", "k_lin"),
    ("q_linear", "k_linear"),
    ("linear_q", "linear_k"),
    ("q_head", "k_head"),
    ("query_proj", "key_proj"),
    ("query_layer", "key_layer"),
    ("project_q", "project_k"),
)
Q_NORM = ("q_norm", "q_layernorm", "query_layernorm", "query_norm", "norm_q", "ln_q", "q_ln", "q_rmsnorm", "qk_norm")
K_NORM = ("k_norm", "k_layernorm", "key_layernorm", "key_norm", "norm_k", "ln_k", "k_ln", "k_rmsnorm", "qk_norm")

VALUE = {
    "v_proj",
    "value",
    "v",
    "wv",
    "Wv",
    "w_v",
    "W_v",
    "W_V",
    "c_v",
    "to_v",
    "v_lin",
    "v_linear",
    "linear_v",
    "v_head",
}
VALUE |= {"value_proj", "value_layer", "project_v"}
OUTPUT = {
    "o_proj",
    "out_proj",
    "output",
    "out",
    "o",
    "wo",
    "Wo",
    "w_o",
    "w_out",
    "W_o",
    "W_O",
    "c_proj",
    "to_out",
    "dense",
}
OUTPUT |= {"out_lin", "out_linear", "linear_out", "linear_o", "linear_proj", "proj", "post_proj", "projection_layer"}
OUTPUT |= {"attention_out", "output_proj", "dense_bias"}
GATE = {"gate", "gate_proj", "g_proj", "o_gate", "gate_bias", "ve_gate", "to_gates"}
NORM_AFTER = {
    "LayerNorm",
    "v_norm",
    "o_norm",
    "out_norm",
    "sub_norm",
    "attn_sub_norm",
    "groupnorm",
}
NORM_AFTER |= {"inner_attn_ln"}
ADDED_TO_LOGITS = {"sinks", "relative_attention_bias", "relative_pos_embeddings", "relative_position_bias_table"}
ADDED_TO_LOGITS |= {
    "relative_position_bias",
    "rel_attn_embed",
    "gru_rel_pos_linear",
    "gru_rel_pos_const",
    "logit_scale",
}
MIXES_HEADS_AFTER = {"lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"}  # differential attention
SHORTENS_KEYS = {"sequence_reduction", "sr", "spatial_reduction"}  # a convolution with a norm of its own
PICKS_KEYS = {"indexer"}
CONVOLVES_BESIDE = {"key_conv_attn_layer", "conv_kernel_layer", "conv_out_layer"}  # ConvBERT
TURNS = {"rotary_emb"}

# what may stand beside queries and keys and leaves it to them what a logit is a product of
HARMLESS = VALUE | OUTPUT | GATE | NORM_AFTER | ADDED_TO_LOGITS | MIXES_HEADS_AFTER | SHORTENS_KEYS | PICKS_KEYS
HARMLESS |= CONVOLVES_BESIDE | TURNS
