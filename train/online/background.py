"""Learning in a thread of its own, on a device of its own, while requests are served."""

from concurrent.futures import Future, ThreadPoolExecutor

from train.online.learning import Online, Round


class Background:
    """Rounds of `Online.learn`, one at a time, beside the thread that decodes.

        with Background(online) as background:
            decoder = Decoder(target.model, drafter, observers=[online.observe, background.swap])
            for prompt in requests:
                decoder.decode([prompt], 128)
                background.ended()
                if online.due():
                    background.begin()

    `swap` as an observer gives the drafter new weights between two passes, as soon as there are
    any. Leaving the context waits for the round that is under way.
    """

    def __init__(self, online: Online) -> None:
        self.online = online
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._round: Future[Round | None] | None = None

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    @property
    def busy(self) -> bool:
        """Whether a round was begun that `ended` has not told of."""
        return self._round is not None

    def begin(self) -> None:
        """Begin a round, if none is under way."""
        if self._round is None:
            self._round = self._pool.submit(self.online.learn)

    def ended(self, *, wait: bool = False) -> Round | None:
        """What came of the round that was begun, once it has ended; wait: however long that takes.
        None where none has, or it had nothing to learn from. Raises what it raised."""
        if self._round is None or not (wait or self._round.done()):
            return None
        ended, self._round = self._round, None
        return ended.result()

    def swap(self, _: object = None) -> None:
        """`Online.swap`, as an observer."""
        self.online.swap()
