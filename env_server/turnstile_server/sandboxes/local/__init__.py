"""Sandboxes on this machine: bubblewrap, or plain processes where that is explicitly allowed."""
