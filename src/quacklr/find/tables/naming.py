"""Names that libraries give to the parts and to the sizes of an attention module."""

from __future__ import annotations


def _spelled(patterns: str, letter: str, word: str) -> tuple[str, ...]:
    """Name patterns filled in for one of query, key and value: {q} is its letter, {query} its word."""
    return tuple(each.format(q=letter, Q=letter.upper(), query=word) for each in patterns.split())


_PROJECTION = (
    "{q}_proj {query} {q} w{q} W{q} w_{q} W_{q} W_{Q} c_{q} to_{q} {q}_lin {q}_linear linear_{q} {q}_head "
    "{query}_proj {query}_layer project_{q}"
)
_NORM = "{q}_norm {q}_layernorm {query}_layernorm {query}_norm norm_{q} ln_{q} {q}_ln {q}_rmsnorm qk_norm"

QUERY_AND_KEY = tuple(zip(_spelled(_PROJECTION, "q", "query"), _spelled(_PROJECTION, "k", "key"), strict=True))
Q_NORM, K_NORM = _spelled(_NORM, "q", "query"), _spelled(_NORM, "k", "key")

# Parts that do not change the logits, or only add to them or scale them, so that the rules ignore them.
HARMLESS = {
    *_spelled(_PROJECTION, "v", "value"),
    # output projections
    *("o_proj", "out_proj", "output", "out", "o", "wo", "Wo", "w_o", "w_out", "W_o", "W_O", "c_proj", "to_out"),
    *("dense", "dense_bias", "out_lin", "out_linear", "linear_out", "linear_o", "linear_proj", "proj", "post_proj"),
    *("projection_layer", "attention_out", "output_proj"),
    *("gate", "gate_proj", "g_proj", "o_gate", "gate_bias", "ve_gate", "to_gates", "w_g"),  # of the output
    # norms of the values or of the output
    *("LayerNorm", "v_norm", "o_norm", "out_norm", "sub_norm", "attn_sub_norm", "groupnorm", "inner_attn_ln"),
    # terms that are added to the logits, and their temperature
    *("sinks", "relative_attention_bias", "relative_pos_embeddings", "relative_position_bias_table"),
    *("relative_position_bias", "rel_attn_embed", "gru_rel_pos_linear", "gru_rel_pos_const", "logit_scale"),
    *("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"),  # differential attention mixes heads after the softmax
    *("sequence_reduction", "sr", "spatial_reduction"),  # a convolution that shortens the sequence of keys
    *("key_conv_attn_layer", "conv_kernel_layer", "conv_out_layer"),  # ConvBERT's, next to the attention
    *("indexer", "rotary_emb"),  # the selection of keys
}

HEAD_SIZE = (
    *("head_dim", "attention_head_size", "head_size", "d_head", "dim_head", "dim_per_head", "key_value_proj_dim"),
    *("hidden_size_per_attention_head", "kv_channels", "d_kv", "d_k"),
)
HEADS = (
    *("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads", "nheads", "heads", "n_local_heads"),
    *("num_attention_heads_per_partition", "h"),
)
GROUPS = (
    *("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "n_local_kv_heads"),
    *("num_query_groups_per_partition", "num_query_groups", "n_query_groups", "n_groups"),
    *("kv_n_heads", "effective_n_kv_heads"),
)
