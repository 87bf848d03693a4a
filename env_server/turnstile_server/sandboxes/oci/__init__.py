"""Images without a container engine, in bubblewrap.

Modules: ``provider`` (a ``LocalProvider`` whose sandboxes have an image's files), ``store`` (images fetched and
unpacked once, by skopeo and umoci), ``sif`` (where Apptainer's files keep their root).
"""
