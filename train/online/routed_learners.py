"""Learners of the drafters that a `RoutedDrafter` chooses from (2310.07177, section 4.3)."""

from collections.abc import Sequence

from decode.base.errors import UserError
from decode.drafters.several.routed import RoutedDrafter
from decode.verification import Verification
from train.online.learning import Online


class RoutedLearning:
    """An observer of the loop: each learner records the rows that its drafter drafts, no others.

    learners: one `Online` with `chosen=True` for each drafter of the router, in the same order.
    None: that drafter does not learn. The caller asks each learner whether it is `due`, lets it
    `learn` and `swap`s its drafter, as without routes. Raises UserError for another number of
    learners, and for one that has another drafter.
    """

    def __init__(self, router: RoutedDrafter, learners: Sequence[Online | None]) -> None:
        if len(learners) != len(router.drafters) or any(
            learner is not None and learner.drafter is not drafter
            for learner, drafter in zip(learners, router.drafters, strict=False)
        ):
            raise UserError(
                f"there are {len(learners)} learners for {len(router.drafters)} routed drafters, "
                "or they have other drafters; give one for each, in the same order"
            )
        self.router, self.learners = router, list(learners)

    def observe(self, verification: Verification) -> None:
        """Record a verification pass; an observer of `decode.loop.decoding.Decoder`."""
        rows, routes = verification.rows.tolist(), self.router.routes.tolist()
        for row, route in zip(rows, routes, strict=True):
            learner = self.learners[route]
            if learner is not None:
                learner.collector.join(row)
        for learner in self.learners:
            if learner is not None:
                learner.observe(verification)
        for row in verification.rows[verification.ended].tolist():
            for learner in self.learners:
                if learner is not None:
                    learner.collector.leave(row)
