"""The laptop engine: a child process with torch on CPU that speaks the part of SGLang's interface that we use.

In the server: ``engine`` (the engine) and ``process`` (the child). In the child: ``worker`` (its main), ``app``
(its HTTP interface), ``scheduler`` (which calls are computed next), ``model``, ``kv_rows`` (the attention cache),
``sampling``, ``stopping`` and ``heap`` (memory given back).
"""
