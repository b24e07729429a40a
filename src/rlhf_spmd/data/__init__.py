"""Ragged batches, data sets of prompts and responses, the training order, and balancing by token counts.

Floor F2. This package must not know ranks, models or roles.

Read in this order:

- ``batch``: a batch of rows (``Batch``) with packed fields (``Ragged``); how batches are joined and sent
- ``balance``: assigns rows to parts and micro-batches by token count; pure

Text to tokens:

- ``files``: reads rows (``Row``) from jsonl, json, parquet or ``datasets``
- ``tokenizer``: loads a tokenizer; encodes and decodes text; finds the tokens that end a response
- ``messages``: messages, tools and template variables of rows and requests, in the form that templates read
- ``encoding``: prompts to token ids (``PromptEncoder``), with messages rendered by a chat template
- ``turn_spans``: a rendered conversation, and the characters of the assistant's turns in it
- ``conversations``: prompts with responses to token ids and a mask of those to learn
- ``reasoning``: reasoning between tags, and what follows it

Data sets:

- ``dataset``: what all data sets and their configurations share (``RowsConfig``, ``DatasetConfig``, ``TokenDataset``)
- ``prompts``, ``sft``, ``preferences``: the data sets and their configurations
- ``cached_dataset``: builds a data set from its rows, or maps its cached file
- ``loader``: the rows in training order (``Loader``, which can resume), and the batches of a validation

Errors: unusable data raise ``DataError``, one line. Code that reads a row raises ``RowError`` with the reason alone;
``named_row`` and ``Row.error`` in ``files`` add file and line.
"""
