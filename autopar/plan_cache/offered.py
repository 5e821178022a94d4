"""A plan that comes with a question, such as that of a checkpoint: taken without a search if the same is asked again.

In: a plan, and the digest of the wishes that it was found for. Out: within `offering`, a search with the same wishes is answered
by it. What can go wrong: the step has changed, and the plan cannot be restored; then there is a line in the log, and a search.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

from autopar.errors import AutoparError
from autopar.pipeline_plan import PipelinePlan, plan_from_json
from autopar.plan import Plan
from autopar.plan_cache.key import digest_of_wishes
from autopar.progress import LOGGER, enter
from autopar.settings import Settings

P = TypeVar("P")


@dataclasses.dataclass(frozen=True)
class Offer:
    """What a plan's `to_json` wrote, the `digest_of_wishes` that it answers, and where it comes from."""

    plan: str
    wishes: str
    source: str


_OFFER: contextvars.ContextVar[Offer | None] = contextvars.ContextVar("offer", default=None)


@contextlib.contextmanager
def offering(offer: Offer | None) -> Iterator[None]:
    """A context in which plans may be answered by an offer."""
    before = _OFFER.set(offer)
    try:
        yield
    finally:
        _OFFER.reset(before)


def find_offer(settings: Settings) -> Offer | None:
    """The offer for these wishes; None if there is none."""
    offer = _OFFER.get()
    return None if offer is None or offer.wishes != digest_of_wishes(settings) else offer


def take_offer(offer: Offer, restore: Callable[[Plan | PipelinePlan], P]) -> P | None:
    """The step with the plan that is offered; None if it is for another step."""
    try:
        enter("restoring the plan of an earlier run")
        planned = restore(plan_from_json(offer.plan))
    except (AutoparError, ValueError, LookupError, TypeError) as error:
        LOGGER.info("the plan of %s cannot be restored: %s", offer.source, error)
        return None
    LOGGER.info("the plan is that of %s", offer.source)
    return planned
