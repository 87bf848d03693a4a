"""HTTP plumbing of both listeners, without any knowledge of model calls or tools.

``listeners`` binds sockets and runs uvicorn; ``starting`` serves until the server behind them is built.
``agent_app`` divides an agent's requests between the model API and the MCP endpoint. ``agent_endpoint`` serves
that app to sandboxes, one listener each. ``exchange`` reads one request of an agent and writes its response.
``origins`` checks which web pages and host names may call.
"""
