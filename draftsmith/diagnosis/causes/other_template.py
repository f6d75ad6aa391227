"""The train text has another chat template than what is served."""

from draftsmith.diagnosis.causes import CAUSES, Cause, Measurement
from draftsmith.diagnosis.evidence import Evidence, find

MOST = 0.5  # of the texts with the served beginning or the served end of prompts


@CAUSES.register("other_template")
class OtherTemplate(Cause):
    says = "the train text has another chat template, other thoughts or another system message"
    remedy = (
        "train with the template that is served: the same tokenizer, chat_template_args and "
        "data.system"
    )

    def measure(self, evidence: Evidence) -> Measurement:
        begin, end = evidence.marks
        if not begin and not end:
            return Measurement(None, "the prompts begin and end with nothing in common")
        texts = [sample.tokens for sample in evidence.samples]
        begun = sum(text[: len(begin)] == begin for text in texts) / len(texts)
        ended = sum(find(end, text) is not None for text in texts) / len(texts)
        figures = (
            f"{begun:.0%} of the train texts begin with the {len(begin)} tokens that all served "
            f"prompts begin with, and {ended:.0%} have the {len(end)} before the answer"
        )
        return Measurement(min(begun, ended) < MOST, figures)
