"""Any samples at all, for what must give them back."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from turnstile.models import EpisodeStats, Sample, SampleSet, TurnSpan, Untrained

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(0, 40))
    versions = tuple(draw(st.lists(st.text(min_size=1), max_size=3, unique=True)))
    spans = draw(st.lists(st.tuples(*[st.integers(0, 40)] * 3, st.booleans()), max_size=3))
    return Sample(
        sample_id=draw(st.text()),
        input_ids=draw(hnp.arrays(np.int32, length)),
        loss_mask=draw(hnp.arrays(np.uint8, length, elements=st.integers(0, 1))),
        logprobs=draw(hnp.arrays(np.float32, length)),
        weight_version=draw(hnp.arrays(np.int32, length, elements=st.integers(-1, len(versions) - 1))),
        weight_version_names=versions,
        turn_spans=tuple(
            TurnSpan(turn_id=f"turn_{i}", context_start=a, start=b, end=c, trained=t)
            for i, (a, b, c, t) in enumerate(spans)
        ),
        kind=draw(st.sampled_from(["main", "subagent", "compaction", "retry", "auxiliary"])),
        episode_id=draw(st.text()),
        group_id=draw(st.none() | st.text()),
        rollout_id=draw(st.text()),
        attempt=draw(st.integers(0, 3)),
        reward=draw(st.none() | finite),
        turn_rewards=tuple(draw(st.none() | finite) for _ in spans) if draw(st.booleans()) else (),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        status=draw(st.sampled_from(["completed", "truncated", "aborted", "failed"])),
        metadata=draw(st.dictionaries(st.text(), json_values, max_size=3)),
    )


sample_sets = st.builds(
    SampleSet,
    samples=st.lists(samples(), max_size=4).map(tuple),
    untrained=st.lists(
        st.builds(Untrained, turn_id=st.text(), tokens=st.integers(0, 9), reason=st.text()), max_size=3
    ).map(tuple),
    stats=st.builds(EpisodeStats, sampled_tokens=st.integers(0, 99), trained_tokens=st.integers(0, 99)),
)
