"""What a user writes outside the package: algorithms, a reward and a transfer protocol, and algorithms that go wrong."""
