"""Batches of ragged sequences, prompt and SFT data sets, a loader with an integer cursor, balancing of token counts.

Floor F2: may import config, objectives, rewards, telemetry; must not know ranks, models or roles.

- ``batch``: Batch, Ragged, concat, encode_json, decode_json
- ``balance``: rows to parts and to micro-batches by token count; pure
- ``files``: rows from jsonl, json, parquet or ``datasets``; DataError
- ``dataset``: what the data sets share: RowsConfig, DatasetConfig, TokenDataset
- ``stored``: a data set from its rows, without the bad ones; the same in a file that all ranks map
- ``encoding``: prompts (text or chat messages) to token ids
- ``prompts``, ``sft``: the two data sets and their configurations
- ``loader``: Loader (training order, resumable) and validation_batches
- ``tokenizer``: load_tokenizer, encode, decode
- ``sort_digits``, ``word_problems``: the quickstart's and the calculator's task as programs
"""
