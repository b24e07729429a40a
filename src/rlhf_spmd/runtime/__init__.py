"""What the programs share: a run from first step to last, roles from configuration, streams of data, rows from files. Floor 7."""
