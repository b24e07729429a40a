"""A training run (F7): its roles from the configuration, its streams of data, its steps, checkpoints and exports."""
