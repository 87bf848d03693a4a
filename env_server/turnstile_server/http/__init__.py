"""HTTP plumbing of both listeners: sockets, uvicorn, and what is read off an agent's request."""
