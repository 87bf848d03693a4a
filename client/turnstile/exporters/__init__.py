"""Rollouts as trainers take them, and samples as files.

For trainers there is a module or package each, and none imports another's: it takes rollouts
(``turnstile.Rollout``) and makes the trainer's own rows. ``turnstile.groups`` is shared by all. Modules:
``slime`` and ``slime_generate`` (slime and miles), ``verl`` (verl), ``trl`` (TRL), ``datasets`` (Hugging Face);
``single_rollouts`` plays one rollout a call for some of them.

For files there is one registry: ``registry`` (the formats of ``--format``), ``sample_files`` (JSON lines,
safetensors, trees), ``parquet``. What a module needs installed is an extra of the package, imported in that module
alone.
"""
