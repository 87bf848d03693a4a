"""Engines sample: token ids in, token ids and logprobs out.

Read ``protocol`` first (what an engine does), then ``registry`` (every engine by name, and how one is created).
``sglang`` attaches to a running SGLang server, with ``sglang_wire`` (the format of ``/generate``),
``sglang_values`` (its ids, logprobs and names of weights, checked),
``sglang_start`` (the checks at start) and ``http_client``. ``embedded/`` is a child process on CPU that speaks the
same interface. In ``trainer`` the training loop samples; ``trainer_calls`` keeps its waiting calls.
``weight_spans`` records which weights sampled which tokens, ``tokenizer_probe`` compares an engine's tokenizer
with ours.
"""
