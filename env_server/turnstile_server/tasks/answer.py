"""The field ``answer`` of a task: the answer that is right."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from turnstile_server.tasks.part import GraderOptions


class Answer(GraderOptions):
    """An answer given through the tool ``submit``. Reward component ``answer``: 1 or 0."""

    in_field = True
    once = True

    grader: Literal["answer"] = "answer"
    kind: Literal["exact", "numeric", "regex"] = "exact"
    value: str | FiniteFloat = Field(description="Text (exact), number (numeric) or pattern of the whole (regex).")
    tolerance: float = Field(0.0, ge=0, allow_inf_nan=False, description="`numeric`: largest |difference|.")
    ignore_case: bool = Field(False, description="`exact` and `regex`: letters' case does not matter.")

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if (self.kind == "numeric") != isinstance(self.value, float):
            wanted = "a number" if self.kind == "numeric" else "text (quote it)"
            raise ValueError(f"kind: {self.kind} needs a `value` that is {wanted}")
        if self.kind == "regex":
            try:
                re.compile(str(self.value))
            except re.error as error:
                raise ValueError(f"`value` is not a regular expression: {error}") from None
        if self.kind != "numeric" and self.tolerance:
            raise ValueError("`tolerance` is for kind: numeric")
        return self
