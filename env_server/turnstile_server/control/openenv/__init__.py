"""OpenEnv on the control API: ``/ws``, ``/reset``, ``/step``, ``/state``, ``/schema``, ``/metadata``, ``/mcp``.

Read ``routes`` (HTTP), ``standby`` (the same without a model), ``openenv_parts``, ``loader`` (imports the
framework late), ``server`` (what the routes do), ``environment`` (one episode as an environment), ``task_choice``,
``openenv_types`` (action, observation, state), ``agent_calls`` and ``tool_wire`` (model and tools for an external
agent); then ``socket`` with its two protocols, ``frames`` (``/ws``) and ``jsonrpc`` (``/mcp``), and
``mcp_sessions``. Only ``routes``, ``standby``, ``openenv_parts`` and ``loader`` are imported with the server; the
others need ``openenv-core``, which takes seconds to import.
"""

from turnstile_server.control.openenv.loader import OpenEnvLoader, preloading
from turnstile_server.control.openenv.openenv_parts import OpenEnvParts
from turnstile_server.control.openenv.routes import build_openenv_router

__all__ = ["OpenEnvLoader", "OpenEnvParts", "build_openenv_router", "preloading"]
