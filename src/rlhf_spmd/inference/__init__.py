"""Models that only generate or score (F7). Read in this order:

- ``loaded_model``: where weights are read, and the command line that ``generate``, ``evaluate``, ``score`` and ``serve`` share
- ``engine``: a loaded model that deals rows to replicas, generates and gathers
- ``prompt_sets``: files of prompts, answered and scored, for ``generate`` and ``evaluate``
- ``sampling_params``, ``requests``, ``llm``: vLLM's ``SamplingParams``, requests made from them, and ``LLM``
- ``openai_forms``, ``service``, ``endpoint``: OpenAI's JSON, the queue in front of the engine, and HTTP, for ``serve``

This package must not know ``training``.
"""
