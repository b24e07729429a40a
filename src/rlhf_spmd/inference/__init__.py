"""Models that only generate or score (F7): one engine under ``LLM``, ``generate``, ``evaluate``, ``score`` and ``serve``."""
