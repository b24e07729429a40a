"""Sizes of published models, as their config.json has them."""

# family, vocabulary, hidden, intermediate, layers, heads, KV heads, tied embeddings: the models' own config.json
MODELS = {
    "qwen2.5_0.5b": ("qwen2", 151936, 896, 4864, 24, 14, 2, True),
    "qwen2.5_7b": ("qwen2", 152064, 3584, 18944, 28, 28, 4, False),
    "qwen2.5_32b": ("qwen2", 152064, 5120, 27648, 64, 40, 8, False),
    "llama3.1_8b": ("llama", 128256, 4096, 14336, 32, 32, 8, False),
    "llama3.1_70b": ("llama", 128256, 8192, 28672, 80, 64, 8, False),
}
KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
