"""Learns in a separate thread, optionally on a separate device, while requests are served."""

from concurrent.futures import Future, ThreadPoolExecutor

from train.online.learning import Online, Round


class Background:
    """Runs rounds of `Online.learn`, one at a time, beside the decoding thread.

        with Background(online) as background:
            decoder = Decoder(target.model, drafter, observers=[online.observe, background.swap])
            for prompt in requests:
                decoder.decode([prompt], 128)
                background.ended()
                if online.due():
                    background.begin()

    As an observer, `swap` gives the drafter new weights between two passes, as soon as they exist.
    Leaving the context waits for the current round.
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
        """Whether a round has begun that `ended` has not returned yet."""
        return self._round is not None

    def begin(self) -> None:
        """Begin a round, unless one is running."""
        if self._round is None:
            self._round = self._pool.submit(self.online.learn)

    def ended(self, *, wait: bool = False) -> Round | None:
        """The result of a round that has ended. wait: wait for the current round.

        None if no round has ended, or if it had nothing to learn from. Raises the round's exception
        if it failed.
        """
        if self._round is None or not (wait or self._round.done()):
            return None
        ended, self._round = self._round, None
        return ended.result()

    def swap(self, _: object = None) -> None:
        """`Online.swap`, as an observer."""
        self.online.swap()
