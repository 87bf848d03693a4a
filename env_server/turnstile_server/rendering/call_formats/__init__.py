"""The formats in which models write tool calls in their text.

- ``protocol``: the seam: the tags around a call, and what stands between them.
- ``registry``: the formats by name, and which one a chat template asks for.
- ``hermes``: JSON between ``<tool_call>`` tags.
"""
