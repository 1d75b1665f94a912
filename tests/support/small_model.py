"""The shape of the small policies of the trainer's tests: `recipe.ModelOptions(from_scratch=SHAPE, ...)`."""

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
