"""The models (floor F3): one decoder for training, scoring and generation, and its split over ranks as data.

Public modules: ``spec`` (what a config.json says), ``sharding`` (which slice of which Hugging Face tensor a rank holds; pure),
``decoder`` (the plain module), ``attention``, ``heads`` (log-probs, values), ``weights`` (Hugging Face directories in),
and one file per family (``llama``, ``qwen2``, ``qwen3``), found by the ``model_type`` of config.json.

Must not know: roles, batches of requests, pages, optimizers, reinforcement learning.
"""
