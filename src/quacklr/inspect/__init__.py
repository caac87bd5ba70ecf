"""`quacklr inspect`: the attention layers of a model as quacklr finds them."""
