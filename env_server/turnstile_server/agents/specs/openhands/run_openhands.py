"""One task for the OpenHands SDK, without a person.

    run_openhands.py INSTRUCTION_FILE WORKDIR STATE_FOLDER MAX_TURNS

Addresses and key are in the environment: OPENAI_BASE_URL, OPENAI_API_KEY, TOOL_URL. Exit codes: 0 the model
was done, or its iterations are used up; 1 the conversation ended in an error, told on standard error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from openhands.sdk import LLM, Agent, Conversation, Tool  # type: ignore[import-not-found]
from openhands.sdk.conversation.exceptions import ConversationRunError  # type: ignore[import-not-found]
from openhands.sdk.conversation.state import ConversationExecutionStatus  # type: ignore[import-not-found]
from openhands.sdk.event.conversation_error import ConversationErrorEvent  # type: ignore[import-not-found]
from openhands.tools.file_editor import FileEditorTool  # type: ignore[import-not-found]
from openhands.tools.terminal import TerminalTool  # type: ignore[import-not-found]

TASK_TOOLS = r"^(?!bash$|read_file$|write_file$|edit_file$)"
"""Pattern for the tools of the MCP endpoint that the agent gets; for the others it has tools of its own."""


def main() -> int:
    instruction_file, workdir, state, max_turns = sys.argv[1:]
    key = os.environ.pop("OPENAI_API_KEY")  # the terminal's commands do not see it
    address = os.environ["OPENAI_BASE_URL"]
    agent = Agent(
        llm=LLM(model="openai/policy", base_url=address, api_key=key, usage_id="agent", num_retries=3),
        tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)],
        mcp_config={"turnstile": {"url": os.environ["TOOL_URL"], "headers": {"Authorization": f"Bearer {key}"}}},
        filter_tools_regex=TASK_TOOLS,
        system_prompt_kwargs={"cli_mode": True},
    )
    conversation = Conversation(
        agent=agent,
        workspace=workdir,
        persistence_dir=state,
        max_iteration_per_run=int(max_turns),
        visualizer=None,
    )
    conversation.send_message(Path(instruction_file).read_text("utf-8"))
    try:
        conversation.run()
    except ConversationRunError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if conversation.state.execution_status != ConversationExecutionStatus.ERROR:
        return 0
    *_, last = (event for event in conversation.state.events if isinstance(event, ConversationErrorEvent))
    sys.stderr.write(f"{last.detail}\n")
    return 0 if last.code == "MaxIterationsReached" else 1


if __name__ == "__main__":
    sys.exit(main())
