"""Real agents against faults: live in sandboxes (``make agents-matrix``), and what they sent, kept for replay."""
