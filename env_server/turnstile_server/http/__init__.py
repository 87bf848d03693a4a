"""HTTP plumbing of both listeners, without any knowledge of model calls or tools.

``listeners`` binds sockets and runs uvicorn; ``starting`` serves until the server behind them is built.
``acceptor`` accepts connections, ``connections`` counts them, by the shares of ``descriptors``; ``http_protocol``
is uvicorn's protocol with bounds, fed by ``body_parts``, and ``refusal`` what it says. ``agent_app`` divides an
agent's requests between the model API and the MCP endpoint. ``agent_endpoint`` serves that app to sandboxes, one
listener each. ``exchange`` reads one request of an agent and writes its response. ``stopping`` ends requests at a
shutdown. ``wrong_keys`` counts and slows those who guess keys. ``intake`` bounds the bodies of all requests
together, by ``fair_share``; ``json_values`` counts what is in them. ``origins`` checks which web pages and host
names may call. ``bounds`` has the constants.
"""
