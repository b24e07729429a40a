"""The models: one decoder for training, scoring and generation, and its split over ranks as data.

Floor F3. This package must not know a role by its name, batches of requests, pages, optimizers or reinforcement learning.

Read in this order. What a model is:

- ``spec``: ``ModelSpec``
- ``layer_kinds``: what a layer may have in place of attention and an MLP
- ``families``: from a config.json to a ``ModelSpec``, a function for each ``model_type``: ``llama``, ``qwen3``, ``gemma2`` and so on
- ``keys``: reads and checks the values of a config.json

Its split over ranks:

- ``sharding``: which slice of which Hugging Face tensor a rank holds (pure)
- ``layout_rules``: which layouts a model allows
- ``tensor_parallel``: collectives with gradients
- ``context_parallel``: attention over ranks that share the tokens of a sequence

The module:

- ``decoder``: one pipeline stage; start here for a forward pass
- ``block``: one of its layers
- ``layers``: holders of parameters
- ``rope``: rotary tables
- ``attention``: attention over packed sequences
- ``latent_attention``: keys and values from a short vector of each token
- ``linear_attention``: the gated delta rule
- ``experts``: the mixture of experts, also over ranks that share them
- ``router_balance``: a mixture's metrics and loss
- ``heads``: log-probs, entropies and values
- ``activations``: what a layer keeps for its backward pass

Adapters:

- ``lora``: their settings, and which slices a rank holds
- ``adapters``: the module
- ``quantized``: matrices of 4 or 8 bits

Files:

- ``stored``: the tensors of a Hugging Face directory
- ``file_forms``: tensors whose form in files differs
- ``weights``: fills a decoder
- ``hub``, ``published``: models by name
"""
