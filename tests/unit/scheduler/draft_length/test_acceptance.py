"""How often drafts are accepted: what counts as tried, what is forgotten, what stands in for what is not known."""

from __future__ import annotations

import pytest

from services.scheduler.draft_length.acceptance import KEPT, PRIOR_WEIGHT, AcceptanceRate


@pytest.mark.parametrize(("drafted", "accepted", "tried"), [(4, 4, 4), (4, 3, 4), (4, 0, 1), (1, 0, 1), (0, 0, 0)])
def test_the_first_refused_token_counts_as_tried(drafted: int, accepted: int, tried: int) -> None:
    rate = AcceptanceRate()
    rate.record(drafted, accepted)
    assert (rate.num_tried, rate.num_accepted) == (tried, accepted)


def test_earlier_drafts_count_less() -> None:
    rate = AcceptanceRate()
    rate.record(4, 4)
    rate.record(4, 0)
    assert rate.num_tried == pytest.approx(KEPT * 4 + 1) and rate.num_accepted == pytest.approx(KEPT * 4)


def test_a_new_sequence_has_the_share_of_all() -> None:
    rate = AcceptanceRate()
    assert rate.share(0.3) == pytest.approx(0.3)
    for _ in range(200):
        rate.record(8, 8)
    full = 8 / (1 - KEPT)
    assert rate.share(0.0) == pytest.approx(full / (full + PRIOR_WEIGHT), rel=1e-6)
