"""What the core is told of the settings."""

from __future__ import annotations

from services.scheduler.main import policy_of
from services.scheduler.state.policy import Policy
from shared.config import Settings


def test_without_any_setting_the_core_does_what_a_deployment_does() -> None:
    assert policy_of(Settings()) == Policy()


def test_a_setting_reaches_the_core_under_its_name() -> None:
    policy = policy_of(Settings.of(max_num_batched_tokens=77, tenant_weights="a=2", num_draft_tokens=3))
    assert (policy.max_num_batched_tokens, policy.tenant_weights, policy.num_draft_tokens) == (77, "a=2", 3)


def test_fetched_blocks_are_compared_only_where_the_same_bits_must_come_out() -> None:
    for is_invariant, every in ((True, 4), (False, 0)):
        assert policy_of(Settings.of(batch_invariant=is_invariant, verify_fetches=4)).verify_fetches == every
