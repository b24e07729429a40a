"""rlhf_spmd: RLHF as one SPMD program under torchrun. See README.md for the tour; nothing heavy is imported here."""

__version__ = "0.1.0"
