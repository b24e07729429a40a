"""Ragged batches, data sets of prompts and responses, the training order, and balancing by token counts.

Floor F2. This package must not know ranks, models or roles.

Errors: whoever reads a row raises ``RowError`` with the reason alone; ``named_row`` and ``Row.error`` in ``files`` add file and line.
Read in this order:

- ``batch``: Batch, Ragged, concat, encode_json, decode_json
- ``balance``: assigns rows to parts and micro-batches by token count; pure
- ``files``: reads rows from jsonl, json, parquet or ``datasets``; DataError, RowError
- ``tokenizer``: load_tokenizer, encode, decode, and the tokens that end a response
- ``messages``: messages, tools and variables of rows and requests in the form that templates read; which variables those read
- ``encoding``: prompts to token ids; PromptEncoder renders messages
- ``conversations``: prompts with responses to token ids and a mask of those to learn
- ``reasoning``: reasoning between tags, and what follows it
- ``dataset``: what all data sets share: RowsConfig, DatasetConfig, TokenDataset
- ``prompts``, ``sft``, ``preferences``: the data sets and their configurations
- ``loader``: builds a data set or maps its cached file; Loader (training order, resumable) and validation_batches
"""
