"""Settings of single rows, over a decode that has one set of settings for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.errors import UserError
from decode.loop import Decoder, Decoding
from decode.sampling import Sampling
from decode.text_stream import Stop


@dataclass(frozen=True)
class RowSettings:
    """How one text is drawn, and where it ends. seed: of its random numbers, with its row's id.
    stop: rows with the same settings may share it. ignore_eos: it goes on after the EOS ids."""

    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop: Stop | None = None
    ignore_eos: bool = False


def require_settings(decoder: Decoder, settings: RowSettings) -> None:
    """Raise UserError for settings that the rows of this decoder cannot have."""
    if settings.sampling != decoder.sampling:
        wanted, given = vars(settings.sampling), vars(decoder.sampling)
        different = [name for name in wanted if wanted[name] != given[name]]
        raise UserError(
            f"{' and '.join(different)} of this service {'is' if len(different) == 1 else 'are'} "
            f"{' and '.join(str(given[name]) for name in different)}, for all requests; leave "
            "it out, or ask for the same"
        )
    if settings.ignore_eos and len(decoder.eos):
        raise UserError("ignore_eos is true; expected false: texts end with an end-of-text token")


class _StopByRow(Stop):
    """The stop of each row that has one."""

    def __init__(self) -> None:
        self.of_row: dict[int, Stop] = {}

    def start(self) -> None:
        self.of_row = {}

    def leave(self, row: int) -> None:
        stop = self.of_row.pop(row, None)
        if stop is not None:
            stop.leave(row)

    def cut(self, row: int, tokens: list[int]) -> int | None:
        return self.of_row[row].cut(row, tokens) if row in self.of_row else None


class RowDecoding(Decoding):
    """A `Decoding` whose rows have seeds and stops of their own."""

    def __init__(self, decoder: Decoder, **options: Any) -> None:
        self._stops = decoder.stop = _StopByRow()
        super().__init__(decoder, **options)

    def admit(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        row_ids: Sequence[int] | None = None,
        settings: RowSettings | None = None,
    ) -> list[int]:
        """As `Decoding.admit`. settings: of all these rows. Raises UserError for settings that
        `require_settings` refuses."""
        settings = settings or RowSettings(self.decoder.sampling, self.seed)
        require_settings(self.decoder, settings)
        self.seed = settings.seed
        # Rows are numbered in the order of all prompts so far, and `admit` may end some of them.
        for row in range(self._admitted, self._admitted + len(prompts)):
            self._stops.leave(row)
            if settings.stop is not None:
                self._stops.of_row[row] = settings.stop
        return super().admit(prompts, max_new_tokens, row_ids=row_ids)
