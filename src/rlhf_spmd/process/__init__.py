"""The life of a rank (F3): arguments, the agreement on input, the error board, the watch over ranks, and how a run ends."""
