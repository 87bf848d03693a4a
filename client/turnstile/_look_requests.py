"""The requests that look at recorded episodes, many or one: listings, statistics, tokens, breaks, spans, work."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from turnstile._requests import ApiCall, episode_path, given
from turnstile.conditions import EpisodeConditions, condition_params
from turnstile.models import (
    BreakReport,
    EpisodePage,
    EpisodeSummaryPage,
    GroupReport,
    ReplayListing,
    ReplayReport,
    SpanReport,
    StatsKey,
    StatsReport,
    TokenMatches,
    TokenWindow,
    TurnOutlines,
    WorkDiff,
)


def page(conditions: EpisodeConditions, cursor: str | None, limit: int | None) -> ApiCall[EpisodePage]:
    params = {**condition_params(conditions), **given(cursor=cursor, limit=limit)}
    return ApiCall("GET", "/episodes", EpisodePage.model_validate_json, params, repeatable=True)


def summary_page(
    conditions: EpisodeConditions, cursor: str | None, limit: int | None
) -> ApiCall[EpisodeSummaryPage]:
    params = {**condition_params(conditions), **given(view="summary", cursor=cursor, limit=limit)}
    return ApiCall("GET", "/episodes", EpisodeSummaryPage.model_validate_json, params, repeatable=True)


def group(group_id: str) -> ApiCall[GroupReport]:
    return ApiCall("GET", f"/groups/{quote(group_id, safe='')}", GroupReport.model_validate_json, repeatable=True)


def stats(
    conditions: EpisodeConditions, by: Sequence[StatsKey], bucket_s: float | None, solved_at: float
) -> ApiCall[StatsReport]:
    grouped = given(by=",".join(by), bucket=bucket_s, solved_at=solved_at)
    params = {**condition_params(conditions), **grouped}
    return ApiCall("GET", "/stats", StatsReport.model_validate_json, params, repeatable=True)


def turn_outlines(episode_id: str) -> ApiCall[TurnOutlines]:
    params = {"arrays": "false"}
    return ApiCall(
        "GET", f"{episode_path(episode_id)}/turns", TurnOutlines.model_validate_json, params, repeatable=True
    )


def breaks(episode_id: str, offset: int, limit: int | None) -> ApiCall[BreakReport]:
    params = given(offset=offset, limit=limit)
    return ApiCall(
        "GET", f"{episode_path(episode_id)}/breaks", BreakReport.model_validate_json, params, repeatable=True
    )


def tokens(episode_id: str, turn_id: str, start: int, count: int | None) -> ApiCall[TokenWindow]:
    params = given(episode_id=episode_id, start=start, count=count)
    path = f"/turns/{quote(turn_id, safe='')}/tokens"
    return ApiCall("GET", path, TokenWindow.model_validate_json, params, repeatable=True)


def find_tokens(
    episode_id: str, turn_id: str, text: str | None, token_id: int | None, after: int, limit: int | None
) -> ApiCall[TokenMatches]:
    params = given(episode_id=episode_id, text=text, id=token_id, after=after, limit=limit)
    path = f"/turns/{quote(turn_id, safe='')}/tokens/find"
    return ApiCall("GET", path, TokenMatches.model_validate_json, params, repeatable=True)


def work(episode_id: str, extra_s: float) -> ApiCall[WorkDiff]:
    path = f"{episode_path(episode_id)}/work"
    return ApiCall("GET", path, WorkDiff.model_validate_json, repeatable=True, extra_s=extra_s)


def replay(episode_id: str) -> ApiCall[ReplayReport]:
    return ApiCall("GET", f"{episode_path(episode_id)}/replay", ReplayReport.model_validate_json, repeatable=True)


def replay_files(episode_id: str, state: int) -> ApiCall[ReplayListing]:
    path, params = f"{episode_path(episode_id)}/replay/files", given(state=state)
    return ApiCall("GET", path, ReplayListing.model_validate_json, params, repeatable=True)


def replay_content(episode_id: str, digest: str) -> ApiCall[bytes]:
    path = f"{episode_path(episode_id)}/replay/{quote(digest, safe='')}"
    return ApiCall("GET", path, bytes, accept="*/*", repeatable=True)


def spans(episode_id: str) -> ApiCall[SpanReport]:
    return ApiCall("GET", f"{episode_path(episode_id)}/spans", SpanReport.model_validate_json, repeatable=True)
