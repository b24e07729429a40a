"""The models (floor F3): one decoder for training, scoring and generation, and its split over ranks as data.

Public modules: ``spec`` (what a config.json says), ``sharding`` (which slice of which Hugging Face tensor a rank holds;
pure), ``decoder`` (the plain module), ``activations`` (what it keeps for the backward pass), ``attention``, ``heads`` (log-probs,
values), ``experts`` (mixture of experts), ``weights`` (Hugging Face directories in), and one file per family, found by
the ``model_type`` of config.json (``llama``, ``qwen3``, ``gemma2`` ...).

Must not know: roles, batches of requests, pages, optimizers, reinforcement learning.
"""
