"""Options of the grader ``judge``: a question, the texts shown with it, and the rule for counting votes."""

from __future__ import annotations

import json
from typing import Annotated, Literal, Self

from pydantic import Field, FiniteFloat, StringConstraints, model_validator

from turnstile_server.settings import GradingSettings
from turnstile_server.tasks.inner_path import InnerPath
from turnstile_server.tasks.part import GraderOptions

_OF_THE_VERDICT = {"url", "model", "temperature", "max_tokens", "json_mode", "extra_body", "max_text_chars"}
"""Settings of a judge that its verdict may depend on."""

Text = Annotated[str, StringConstraints(min_length=1, max_length=100_000)]


class JudgeOptions(GraderOptions):
    """A language model's verdict."""

    grader: Literal["judge"]
    judge: str = Field(description="One of the server's `grading.judges`.")
    question: Text = Field(description="What is to be judged, with the rubric.")
    show: tuple[Literal["instruction", "answer"], ...] = Field(
        ("instruction", "answer"), description="What is shown of the task and of the submission."
    )
    files: tuple[InnerPath, ...] = Field((), max_length=20, description="Files of the work folder to show.")
    files_as: Literal["text", "diff"] = Field("text", description="As they are, or what the work changed in them.")
    reference: Text | None = Field(
        None, description="A right answer, shown as such; or the one to `compare` with."
    )
    compare: bool = Field(False, description="Which is better, the work or `reference`? 1: the work.")
    equal: FiniteFloat = Field(0.5, ge=0, le=1, description="`compare`: value where both are as good.")
    swap: bool = Field(True, description="`compare`: each vote asks in both orders, and takes their mean.")
    scale: tuple[FiniteFloat, FiniteFloat] | None = Field(
        None, description="The judge gives a number from the first to the second, which becomes 0 to 1."
    )
    votes: int = Field(1, ge=1, le=25, description="How often the judge is asked.")
    combine: Literal["majority", "mean"] = Field("majority", description="How votes become the component.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.compare and self.reference is None:
            raise ValueError("`compare` needs the `reference` to compare with")
        if self.compare and self.scale is not None:
            raise ValueError("`compare` asks which is better; it has no `scale`")
        if self.scale is not None and self.scale[0] >= self.scale[1]:
            raise ValueError("`scale` is [least, greatest]")
        if self.combine == "majority" and self.votes > 1:
            if self.compare or self.scale is not None:
                raise ValueError("`compare` and `scale` give numbers: use combine: mean")
            if self.votes % 2 == 0:
                raise ValueError("an even number of votes may have no majority: use an odd one, or combine: mean")
        if not self.files and "answer" not in self.show:
            raise ValueError("nothing of the work is shown: name `answer` in `show`, or `files`")
        return self

    def problem(self, settings: GradingSettings) -> str | None:
        judge = settings.judges.get(self.judge)
        if judge is None:
            have = ", ".join(settings.judges) or "none"
            return f"judge: there is no judge {self.judge!r} in the settings (grading.judges); there are: {have}"
        if self.calls > judge.max_calls_per_grading:
            return (
                f"votes: they need {self.calls} calls, and the judge is asked at most "
                f"{judge.max_calls_per_grading} times for one work "
                f"(grading.judges.{self.judge}.max_calls_per_grading)"
            )
        return None

    def judged_by(self, settings: GradingSettings) -> bytes:
        if self.judge not in settings.judges:
            return b"-"
        judge = settings.judges[self.judge].model_dump(mode="json", include=_OF_THE_VERDICT)
        return json.dumps(judge, sort_keys=True).encode()

    @property
    def reads_work(self) -> bool:
        return bool(self.files)

    @property
    def calls(self) -> int:
        """Calls of the judge for one work."""
        return self.votes * (2 if self.compare and self.swap else 1)
