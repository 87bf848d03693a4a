"""OpenEnv on the control API: ``/ws``, ``/reset``, ``/step``, ``/state``, ``/schema``, ``/metadata``, ``/mcp``.

Read ``routes`` (HTTP), ``standby`` (the same without a model), ``openenv_parts``, ``server`` (what the routes do),
``environment`` (one episode as an environment), ``task_choice``, ``task_api``, ``openenv_wire`` (OpenEnv's types),
``openenv_types`` (action, observation, state of ours), ``agent_calls`` and ``tool_wire`` (model and tools for an
external agent); then ``socket`` with its two protocols, ``frames`` (``/ws``) and ``jsonrpc`` (``/mcp``), and
``mcp_sessions``.
"""

from turnstile_server.control.openenv.openenv_parts import OpenEnvParts
from turnstile_server.control.openenv.routes import build_openenv_router, descriptions
from turnstile_server.control.openenv.server import OpenEnvServer
from turnstile_server.control.openenv.task_api import build_task_router

__all__ = ["OpenEnvParts", "OpenEnvServer", "build_openenv_router", "build_task_router", "descriptions"]
