"""The formats in which models write tool calls in their text.

- ``protocol``: the seam: what may begin a call, and what a reply from there on is.
- ``base``: what formats share.
- ``registry``: the formats by name.
- ``json_text``: JSON as models write it.
- ``tool_schemas``: the tools that may be called, and the values that their schemas take.
- ``checked_calls``: what was read as a call, against the tools.
- ``json_calls``, ``json_formats``: JSON objects between marks.
- ``headed_calls``, ``headed_formats``: a heading with the name, and JSON behind it.
- ``tagged_calls``, ``tagged_formats``: tags around bare values.
- ``whole_json``, ``pythonic``: calls that are the whole reply.
- ``braced_calls``, ``nested_tags``, ``framed_messages``: forms of single families (Gemma; MiniMax M3; gpt-oss,
  Muse Glimmer and Kimi K3).
"""
