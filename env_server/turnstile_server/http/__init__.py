"""HTTP plumbing of both listeners, without any knowledge of model calls or tools.

``listeners`` binds sockets and runs uvicorn; ``agent_app`` divides an agent's requests between the model API and
the MCP endpoint, and ``agent_endpoint`` serves it to sandboxes; ``exchange`` reads one such request and writes its
response.
"""
