"""Models that generate or score without being trained.

Floor F7. This package must not know ``training``.

One path serves all programs: prompts become groups of the generator's ``Request`` (``prompt_sets`` from files, ``requests`` from
callers), ``InferenceEngine.groups_of_replica`` deals the groups to replicas, ``complete`` or the service's turns generate them, and
``gather_records`` brings the results to rank 0.

Read in this order. For ``generate``, ``evaluate`` and ``score``, which read and write files:

- ``inference_program``: the command line of these programs and of ``serve``
- ``loaded_model``: where a model's weights are read: a Hugging Face directory, a run or a checkpoint
- ``inference_engine``: distributes rows over replicas, generates, gathers results
- ``prompt_sets``: files of prompts, answered and scored
- ``output_files``: results, and finished rows from which a killed job goes on

For ``LLM`` and ``serve``, which answer requests:

- ``structured_outputs``: grammars that responses follow
- ``sampling_params``: ``SamplingParams`` and outputs, with vLLM's names
- ``requests``: turns prompts into requests of the engine
- ``outputs``: turns completions into outputs
- ``llm``: the class ``LLM``
- ``openai_forms``: OpenAI's and vLLM's JSON
- ``answers``: a client's answer, whole or as a stream, while its responses grow
- ``served_adapters``: LoRA adapters of the model, of which requests name one
- ``service``: the queue of clients' requests in front of the engine
- ``endpoint``: HTTP
"""
