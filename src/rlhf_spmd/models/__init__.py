"""The models: one decoder for training, scoring and generation, and its split over ranks as data.

Floor F3. This package must not know roles, batches of requests, pages, optimizers or reinforcement learning.

Read in this order:

- ``spec``: what a model is (``ModelSpec``); ``layer_kinds``: what a layer may have in place of attention and an MLP
- ``families``: from a config.json to a ``ModelSpec``, a function for each ``model_type``: ``llama``, ``qwen3``, ``gemma2`` and so on;
  ``keys`` reads and checks the file's values
- ``sharding``: which slice of which Hugging Face tensor a rank holds (pure); ``layout_rules``: which layouts a model allows
- ``decoder``: the module; ``block``: one of its layers; ``layers``: holders of parameters; ``rope``: rotary tables
- ``attention``: attention over packed sequences; ``context_parallel``: over ranks that share their tokens
- ``linear_attention``: the gated delta rule; ``experts``: the mixture of experts, also over ranks that share them
- ``router_balance``: a mixture's metrics and loss
- ``heads``: log-probs, entropies and values
- ``tensor_parallel``: collectives with gradients; ``activations``: what a layer keeps for its backward pass
- ``lora``, ``adapters``, ``quantized``: adapters beside matrices, of 4 or 8 bits
- ``stored``, ``file_forms``, ``weights``: Hugging Face directories in and out; ``hub``, ``published``: models by name
"""
