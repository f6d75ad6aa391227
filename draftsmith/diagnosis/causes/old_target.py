"""The train text is not what the served target writes."""

import numpy as np
import torch

from draftsmith.diagnosis.causes import CAUSES, Cause, Measurement, surely_above
from draftsmith.diagnosis.evidence import Evidence


@CAUSES.register("old_target")
class OldTarget(Cause):
    says = (
        "the train text is not what this target writes: an older version, another model or people "
        "wrote it"
    )
    remedy = "answer the prompts anew with a generate stage of the served target, and train on that"

    @torch.no_grad()
    def measure(self, evidence: Evidence) -> Measurement:
        """In a text that the target drew, a token is another one than the likeliest with the
        probability that the likeliest leaves. Top-k, top-p and min-p leave less."""
        temperature = 1.0 if evidence.temperature is None else evidence.temperature
        found = []
        for sample in evidence.samples:
            trained = torch.tensor(sample.mask)[1:]
            if not trained.any():
                continue
            ids = torch.tensor([sample.tokens], device=evidence.target.device)
            logits = evidence.target.model(ids).logits[0, :-1].float().cpu()[trained]
            others = logits.argmax(-1) != torch.tensor(sample.tokens)[1:][trained]
            expected = torch.zeros(len(others))
            if temperature:
                expected = 1 - (logits / temperature).softmax(-1).amax(-1)
            found.append([float(others.float().mean()), float(expected.mean())])
        if not found:
            return Measurement(None, "no text has a trained token")
        there, own = np.array(found).T
        return Measurement(
            surely_above(there - own),
            f"{there.mean():.1%} of the trained tokens are not the target's likeliest; in texts of "
            f"its own at temperature {temperature:g} {own.mean():.1%} would be",
        )
