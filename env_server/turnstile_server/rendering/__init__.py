"""Chat templates: messages to token ids, and sampled ids back to a reply.

Reading order:

- ``protocol``: the seam that the rest of the server sees (``Renderer``, ``ReplyParser``, the deltas of a reply).
- ``factory``: builds the renderer that the settings name.
- ``vocabulary``: a model folder's tokenizer, its control tokens and end tokens.
- ``encoder``: text to ids; text of a caller never becomes a control token.
- ``token_floor``, ``repeats``, ``repeat_encoder``: what makes texts of megabytes cheap.
- ``fast_bpe``: a second encoder for ASCII text, where it gives the same ids.
- ``normalise``: messages and tools in the shape that templates expect.
- ``detokenizer``: ids to text as they come, cut at stop strings.
- ``token_text``: single tokens as people see them.
- ``tags``: the tags around thinking and calls, and where thinking is open.
- ``call_formats``: how models write tool calls; ``recognition``: which of the formats is a template's.
- ``message_rules``: messages that a template does not keep in their place, and what is done about them.
- ``reply_parser``: a completion to text, reasoning and calls.
- ``template``, ``synthetic``, ``continuation``: the renderer for any Hugging Face chat template;
  ``written_reply``: what it writes for a reply.
- ``model_report``: what a model folder can do, and what is not exact, for people.
- ``traced_text``, ``traced_template``, ``marked_text``, ``bridge_traces``: what makes a continuation cheap where
  messages like the new ones were seen before.
"""
