"""The tools themselves: what each does in a sandbox. Raises WrongArguments and FileProblem, which are answered as
results, and SandboxFailed, which is not the model's affair."""

from __future__ import annotations

import posixpath

from turnstile_server.sandboxes.protocol import Command, Sandbox
from turnstile_server.settings import ToolSettings
from turnstile_server.tools.arguments import (
    BashArguments,
    EditFileArguments,
    ReadFileArguments,
    WriteFileArguments,
    WrongArguments,
)
from turnstile_server.tools.results import ToolResult, cut_middle, decoded, numbered

_UTF8_BYTES = 4
"""Most bytes that one character takes."""
_OUTPUTS_JOINED = "exec 2>&1; "
"""Before every command and on its first line, so that bash counts the lines of its messages as the model does."""


async def bash(sandbox: Sandbox, arguments: BashArguments, settings: ToolSettings) -> ToolResult:
    """A new shell in the work folder. The result ends with the exit status, whatever was cut before it."""
    most = settings.max_command_timeout_s
    timeout_s = arguments.timeout_s or settings.command_timeout_s
    if timeout_s > most:
        raise WrongArguments(f"timeout_s is {timeout_s:g}, but no command may run longer than {most:g} s")
    command = Command(
        argv=("bash", "-c", _OUTPUTS_JOINED + arguments.command),
        timeout_s=timeout_s,
        max_output_bytes=settings.max_output_chars * _UTF8_BYTES,
    )
    result = await sandbox.exec(command)
    # Standard error holds what bash says before it runs anything: a syntax error on the first line.
    output = decoded(result.stdout + result.stderr)
    text = cut_middle(output, settings.max_output_chars, result.dropped_bytes)
    ending = f"killed after {timeout_s:g} s" if result.timed_out else f"exit status {result.exit_code}"
    separator = "\n" if text and not text.endswith("\n") else ""
    return ToolResult(f"{text}{separator}[{ending}]", is_error=result.timed_out)


async def read_file(sandbox: Sandbox, arguments: ReadFileArguments, settings: ToolSettings) -> ToolResult:
    data = await sandbox.read(_absolute(sandbox, arguments.path), settings.max_file_bytes)
    if b"\0" in data:
        return ToolResult(f"{arguments.path} is not a text file ({len(data)} bytes)", is_error=True)
    lines = decoded(data).split("\n")
    if lines[-1] == "":
        lines.pop()  # what follows the last line end is no line
    if not lines:
        return ToolResult(f"[{arguments.path} is empty]")
    first = arguments.offset or 1
    if first > len(lines):
        lines_there = "1 line" if len(lines) == 1 else f"{len(lines)} lines"
        return ToolResult(f"{arguments.path} has only {lines_there}", is_error=True)
    asked = lines[first - 1 :][: arguments.limit]
    text, shown = numbered(asked, first, settings.max_file_chars)
    last = first + shown - 1
    if last == len(lines):
        return ToolResult(text)
    more = f"[lines {first} to {last} of {len(lines)}; continue with offset {last + 1}]"
    return ToolResult(f"{text}\n{more}")


async def write_file(sandbox: Sandbox, arguments: WriteFileArguments, settings: ToolSettings) -> ToolResult:
    size = await _write(sandbox, arguments.path, arguments.content, settings)
    return ToolResult(f"Wrote {size} bytes to {arguments.path}.")


async def edit_file(sandbox: Sandbox, arguments: EditFileArguments, settings: ToolSettings) -> ToolResult:
    path, old, new = arguments.path, arguments.old, arguments.new
    if old == new:
        raise WrongArguments("old and new are the same text; nothing would change")
    data = await sandbox.read(_absolute(sandbox, path), settings.max_file_bytes)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return ToolResult(f"{path} is not UTF-8 text; edit it with bash", is_error=True)
    count = text.count(old)
    if count == 0:
        hint = " (its lines end in CR LF)" if "\r\n" in text and "\n" in old else ""
        return ToolResult(f"old does not occur in {path}{hint}; it must match exactly, blanks included", True)
    if count > 1 and not arguments.replace_all:
        return ToolResult(
            f"old occurs {count} times in {path}; give more of the text around it, or set replace_all", True
        )
    await _write(sandbox, path, text.replace(old, new), settings)
    return ToolResult(f"Replaced {count} occurrence{'' if count == 1 else 's'} in {path}.")


async def _write(sandbox: Sandbox, path: str, text: str, settings: ToolSettings) -> int:
    """The number of bytes written."""
    data = text.encode("utf-8")
    if len(data) > settings.max_file_bytes:
        raise WrongArguments(
            f"the file would have {len(data)} bytes; the most is {settings.max_file_bytes}: write it with bash"
        )
    await sandbox.write(_absolute(sandbox, path), data)
    return len(data)


def _absolute(sandbox: Sandbox, path: str) -> str:
    return posixpath.join(sandbox.workdir, path)
