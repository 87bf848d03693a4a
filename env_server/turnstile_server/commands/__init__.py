"""Commands that the server adds to ``turnstile``: this table, and a module for each command.

Each name below is an entry point in ``pyproject.toml``, in the group ``turnstile.commands``, or in
``turnstile.commands.agents`` for a command under ``turnstile agents``. It is a pair: where the code is
(``"module:function"``, or a table of such pairs for a group of commands), and the sentence that the list of
commands shows. A new command is one line here and one there. This module imports nothing, so that listing the
commands costs nothing.

Modules in reading order: ``serve`` (flags to settings to a running server), ``demo``, ``tasks``,
``proof_tools`` with ``validate_tasks`` and ``openenv_certify``, ``init`` (with the files of ``scaffold/``),
``agents``, ``doctor``, ``openenv_layout``.
``view_folder`` is no command: the client's ``turnstile ui`` calls it, by an entry point of its own.
"""

DEMO = (
    "turnstile_server.commands.demo:demo",
    "Play the tiny policy that ships on small tasks: graded, audited, shown token by token.",
)
DOCTOR = (
    "turnstile_server.commands.doctor:machine",
    "Try what holds sandboxes on this machine: one is made, and attacked from inside.",
)
INIT = (
    "turnstile_server.commands.init:init",
    "Make a folder with a task of your own as a Python class, and a test that plays it.",
)
SERVE = (
    "turnstile_server.commands.serve:serve",
    "Run a server: the control API for trainers, the model API for agents, an engine behind them.",
)
TASKS = (
    {
        "list": (
            "turnstile_server.commands.tasks:list_tasks",
            "List tasks: id, difficulty, how each is graded, first line of the instruction.",
        ),
        "show": (
            "turnstile_server.commands.tasks:show_task",
            "Show one task as YAML, without the parts that are hidden from agents.",
        ),
        "build": (
            "turnstile_server.commands.build_tasks:build",
            "Build the images of tasks that bring a Dockerfile (Harbor's folders).",
        ),
        "validate": (
            "turnstile_server.commands.validate_tasks:validate",
            "Prove tasks: the gold solution scores 1, an empty one does not, every time the same; no leaks.",
        ),
    },
    "List, show, build and validate tasks.",
)

OPENENV = (
    {
        "layout": (
            "turnstile_server.commands.openenv_layout:layout",
            "Write the layout that `openenv push` wants into a folder.",
        ),
        "certify": (
            "turnstile_server.commands.openenv_certify:certify",
            "Check a task set by the ids of OpenEnv's policy: oracle, floor, leaks, isolation, attacks.",
        ),
    },
    "Prepare this project for OpenEnv's tools.",
)

AGENTS_INSTALL = (
    "turnstile_server.commands.agents:install",
    "Install agents into the folder that this machine's servers mount into sandboxes.",
)
AGENTS_DOCTOR = (
    "turnstile_server.commands.doctor:doctor",
    "Install an agent, let it make one tool call, and report whether all of it was recorded.",
)
