"""The engine inside: a child process with torch, on the CPU or a GPU, that speaks a part of SGLang's interface.

In the server: ``engine`` (the engine) and ``process`` (the child). In the child: ``worker`` (its main), ``app``
(its HTTP interface), ``scheduler`` (which calls are computed next), ``device`` (where, in which type), ``model``,
``tensors`` (new weights in a request), ``kv_rows`` (the attention cache), ``sampling``, ``stopping`` and ``heap``
(memory given back).
"""
