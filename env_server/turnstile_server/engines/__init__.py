"""Engines sample: token ids in, token ids and logprobs out.

Read ``protocol`` first (what an engine does), then ``registry`` (every engine by name, and how one is created).
``sglang/`` and ``vllm/`` attach to a running server each; ``embedded/`` is a child process on CPU that speaks
SGLang's interface; in ``trainer`` the training loop samples (``trainer_calls``: its waiting calls). ``fleet/``
makes many engines one, and ``launch/`` starts a server like SGLang and keeps it running (``child_log`` reads what
such processes write).

What they share: ``prompts`` with ``prompt_json`` (prompts, written once), ``http_client`` with ``http_pool``,
``http_connection`` and ``deadlines`` (the way to a server), ``replies`` and ``server_replies`` (and back),
``call_checks`` and ``server_scores`` (calls and scores), ``server_start``, ``model_config`` and
``tokenizer_probe`` (is it the model and the tokenizer that we have?), ``weights`` with ``serialized_tensors``,
``tensor_shapes`` and ``group_relay`` (how new weights come), ``versions`` and ``weight_spans`` (which weights
sampled which tokens). ``bounds`` has the constants.
"""
