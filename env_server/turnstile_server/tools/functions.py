"""The built-in tools themselves.

Each function runs one tool in a sandbox. It raises WrongArguments and FileProblem, which the model gets as
results, and SandboxFailed, which is no fault of the model. The first functions keep a result within its bounds:
pure functions of text.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from turnstile_server.sandboxes.protocol import Command, Sandbox
from turnstile_server.sandboxes.shell import shell_argv
from turnstile_server.settings import ToolSettings
from turnstile_server.tools.arguments import (
    BashArguments,
    EditFileArguments,
    ReadFileArguments,
    WriteFileArguments,
)
from turnstile_server.tools.bounds import McpBounds
from turnstile_server.tools.progress import run_reporting
from turnstile_server.tools.protocol import Progress, ToolResult, WrongArguments
from turnstile_server.tools.results import BashResult, EditFileResult, ReadFileResult, WriteFileResult

_UTF8_BYTES = 4
"""The most bytes that one character takes."""
_ROW_CHARS = 8
"""The least that a line takes where lines are numbered: six digits, a tab and its end."""
_SKIPPED_CHARS = 1 << 14
"""Line ends are counted in so many characters at once, to find a line."""
_OUTPUTS_JOINED = "exec 2>&1; "
"""Joins standard error to standard output. It stands on the command's first line, so that the line numbers in
bash's messages are those that the model knows."""


def decoded(data: bytes) -> str:
    """Output of a command as text; bytes that are not UTF-8 become U+FFFD."""
    return data.decode("utf-8", "replace")


def cut_middle(text: str, max_chars: int, dropped_bytes: int = 0) -> str:
    """``text`` cut to ``max_chars`` characters from both ends.

    A line between the ends says how much is missing. ``dropped_bytes``: bytes that were left out of its middle
    before.
    """
    if len(text) <= max_chars and not dropped_bytes:
        return text
    kept = min(len(text), max_chars)
    head, tail = text[: kept - kept // 2], text[len(text) - kept // 2 :]
    middle = text[len(head) : len(text) - len(tail)]
    left_out = dropped_bytes + len(middle.encode("utf-8", "replace"))
    return f"{head}\n[… {left_out} bytes left out here; narrow the command to see them …]\n{tail}"


def numbered(lines: Sequence[str], first: int, max_chars: int) -> tuple[str, int]:
    """As many lines as fit ``max_chars``, and their count.

    Each line has its number and a tab before it, as ``cat -n`` prints it; the first number is ``first``. A first
    line that does not fit alone is cut.
    """
    shown: list[str] = []
    room = max_chars
    for number, line in enumerate(lines, first):
        row = f"{number:6d}\t{line}"
        if len(row) > room:
            if not shown:
                cut = len(row) - room
                shown.append(f"{row[:room]}[… {cut} characters of this line left out …]")
            break
        shown.append(row)
        room -= len(row) + 1
    return "\n".join(shown), len(shown)


def lines_from(text: str, first: int, most: int) -> list[str]:
    """At most ``most`` lines from line ``first`` on; the first line of a text is 1. No other line is made."""
    start, left = 0, first - 1
    while (found := text.count("\n", start, start + _SKIPPED_CHARS)) < left:
        start, left = start + _SKIPPED_CHARS, left - found
    for _ in range(left):
        start = text.index("\n", start) + 1
    return text[start:].split("\n", most)[:most]


async def bash(
    sandbox: Sandbox, arguments: BashArguments, settings: ToolSettings, progress: Progress
) -> ToolResult:
    """Runs the command in a new shell in the work folder; ``progress`` gets the seconds and the latest line.

    The result always ends with the exit status, even where its output is cut.
    """
    most = settings.max_command_timeout_s
    timeout_s = arguments.timeout_s or settings.command_timeout_s
    if timeout_s > most:
        raise WrongArguments(f"timeout_s is {timeout_s:g}, but no command may run longer than {most:g} s")
    joined = "" if settings.separate_stderr else _OUTPUTS_JOINED
    command = Command(
        argv=shell_argv(joined + arguments.command),
        timeout_s=timeout_s,
        max_output_bytes=settings.max_output_chars * _UTF8_BYTES,
    )
    result = await run_reporting(sandbox, command, progress, settings.bounds_of(McpBounds).progress_s)
    # Before it runs anything, bash reports a syntax error of the first line to standard error.
    output = decoded(result.stdout + result.stderr)
    chars, dropped = settings.max_output_chars, result.dropped_bytes
    text = cut_middle(output, chars, dropped)
    ending = f"killed after {timeout_s:g} s" if result.timed_out else f"exit status {result.exit_code}"
    separator = "\n" if text and not text.endswith("\n") else ""
    stdout, stderr = decoded(result.stdout), decoded(result.stderr)
    of_stderr = dropped if len(result.stderr) >= command.max_output_bytes else 0
    structured = BashResult(
        exit_code=result.exit_code,
        stdout=cut_middle(stdout, chars, dropped - of_stderr),
        stderr=cut_middle(stderr, chars, of_stderr),
        truncated=dropped > 0 or max(len(stdout), len(stderr)) > chars,
        timed_out=result.timed_out,
        duration_s=round(result.duration_s, 3),
    )
    return ToolResult(f"{text}{separator}[{ending}]", result.timed_out, structured.model_dump())


async def read_file(
    sandbox: Sandbox, arguments: ReadFileArguments, settings: ToolSettings, progress: Progress
) -> ToolResult:
    """Lines of a text file, numbered; where they stop short, the offset to go on with."""
    data = await sandbox.read(_absolute(sandbox, arguments.path), settings.max_file_bytes)
    if b"\0" in data:
        return ToolResult(f"{arguments.path} is not a text file ({len(data)} bytes)", is_error=True)
    whole = decoded(data)
    total = whole.count("\n") + (not whole.endswith("\n"))
    if not whole:
        empty = ReadFileResult(
            path=arguments.path, content="", first_line=0, last_line=0, total_lines=0, truncated=False
        )
        return ToolResult(f"[{arguments.path} is empty]", structured=empty.model_dump())
    first = arguments.offset or 1
    if first > total:
        lines_there = "1 line" if total == 1 else f"{total} lines"
        return ToolResult(f"{arguments.path} has only {lines_there}", is_error=True)
    most = settings.max_file_chars
    asked = min(arguments.limit or total, total - first + 1)
    lines = lines_from(whole, first, min(asked, most // _ROW_CHARS + 1))
    text, shown = numbered(lines, first, most)
    last = first + shown - 1
    content = "\n".join(lines[:shown])
    structured = ReadFileResult(
        path=arguments.path,
        content=content[:most],
        first_line=first,
        last_line=last,
        total_lines=total,
        truncated=shown < asked or len(content) > most,
    ).model_dump()
    if last == total:
        return ToolResult(text, structured=structured)
    more = f"[lines {first} to {last} of {total}; continue with offset {last + 1}]"
    return ToolResult(f"{text}\n{more}", structured=structured)


async def write_file(
    sandbox: Sandbox, arguments: WriteFileArguments, settings: ToolSettings, progress: Progress
) -> ToolResult:
    """Makes a text file, with its folders, or replaces all of it."""
    size = await _write(sandbox, arguments.path, arguments.content, settings)
    structured = WriteFileResult(path=arguments.path, size_bytes=size)
    return ToolResult(f"Wrote {size} bytes to {arguments.path}.", structured=structured.model_dump())


async def edit_file(
    sandbox: Sandbox, arguments: EditFileArguments, settings: ToolSettings, progress: Progress
) -> ToolResult:
    """Replaces text that occurs exactly once in a UTF-8 file, or every occurrence."""
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
    # Before it is made: a short text in the place of each character may be more than the server has memory for.
    _check_size(len(data) + count * (len(new.encode()) - len(old.encode())), settings)
    await _write(sandbox, path, text.replace(old, new), settings)
    return ToolResult(
        f"Replaced {count} occurrence{'' if count == 1 else 's'} in {path}.",
        structured=EditFileResult(path=path, replacements=count).model_dump(),
    )


async def _write(sandbox: Sandbox, path: str, text: str, settings: ToolSettings) -> int:
    """The number of bytes written."""
    data = text.encode("utf-8")
    _check_size(len(data), settings)
    await sandbox.write(_absolute(sandbox, path), data)
    return len(data)


def _check_size(size: int, settings: ToolSettings) -> None:
    """Raises WrongArguments."""
    if size > settings.max_file_bytes:
        raise WrongArguments(
            f"the file would have {size} bytes; the most is {settings.max_file_bytes}: write it with bash"
        )


def _absolute(sandbox: Sandbox, path: str) -> str:
    return posixpath.join(sandbox.workdir, path)
