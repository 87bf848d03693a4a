"""Agents that Turnstile launches: declarative specs, one file each. No other code knows an agent by its name.

In reading order:

- ``spec``: the fields of a spec.
- ``registry``: loads the installed agents and those of the settings when the server starts.
- ``shipped``: the agents that ship, as entry points.
- ``launch``: fills a spec's placeholders with one episode's values.
- ``ending``: what an agent's own log says about how it ended.
- ``installer``: installs each agent once, into a folder that sandboxes mount read-only.
- ``packages``: runs pip (or uv) and npm for the installer.
- ``specs/``: the agents that ship. The programs beside the YAML files run inside sandboxes, never in the server.
"""
