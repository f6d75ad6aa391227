"""Does a server run the target? Its greedy text shows it, token ids alone do not."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from decode.base.errors import UserError
from decode.draw.sampling import Sampling
from decode.model.loading import Target
from train.engines.answers.protocols import Answer, AnswerReader, AskSettings, WantedAnswer
from train.engines.ask_servers import ask_servers
from train.settings.server_config import ServerConfig

PROBE_TOKENS = 32
# A greedy token counts as another model's if the target's likeliest token is so much likelier, in
# nats. Rounding to 16 bits moves logits by less; rounding to 8 or 4 bits rarely moves them so far.
STRANGE = 0.5
# Models of one family, such as 0.6B and 8B parameters, differ in about a fifth of the tokens.
MOST_STRANGE = 0.1


def check_model(
    urls: Sequence[str],
    prompts: Sequence[list[int]],
    target: Target,
    config: ServerConfig,
    settings: AskSettings,
) -> None:
    """Let each server answer a few prompts greedily, and compare the tokens with the target's
    logits. Raises UserError if a server runs another model, or does not answer."""
    rows = [WantedAnswer(-1 - number, prompt) for number, prompt in enumerate(prompts)]
    greedy = replace(
        settings,
        sampling=Sampling(),
        max_new_tokens=min(PROBE_TOKENS, settings.max_new_tokens),
    )
    for url in urls:
        probes = _ask(url, rows, target, config, greedy)
        logits = [_logits(target, prompt, answer.tokens) for prompt, answer in probes]
        strange = sum(
            int((below_likeliest(row, torch.tensor(answer.tokens).to(row.device)) > STRANGE).sum())
            for row, (_, answer) in zip(logits, probes, strict=True)
        )
        total = sum(len(answer.tokens) for _, answer in probes)
        if strange > MOST_STRANGE * total:
            raise UserError(
                f"{url} does not run the target {target.name}: of {total} tokens that it chose "
                f"greedily, {strange} are much less likely for the target than another token. "
                "Start the server with this model. If it runs a strongly quantised copy of it, and "
                "you want that copy's text, set server.probe_prompts: 0"
            )


def below_likeliest(logits: Tensor, tokens: Tensor) -> Tensor:
    """How far each token's logit is below the largest one. logits: [n, V]. tokens: int64 [n]."""
    return logits.amax(-1) - logits.gather(1, tokens[:, None])[:, 0]


def _ask(
    url: str,
    rows: Sequence[WantedAnswer],
    target: Target,
    config: ServerConfig,
    settings: AskSettings,
) -> list[tuple[list[int], Answer]]:
    """The usable answers of one server with their prompts. Raises UserError if there are none."""
    answers: dict[WantedAnswer, Answer] = {}
    reader = AnswerReader.of_target(target, settings)
    ask_servers([url], rows, config, settings, reader, answers.__setitem__)
    usable = [(row.prompt, answer) for row, answer in answers.items() if answer.tokens]
    if not usable:
        worst = next(iter(answers.values()))
        raise UserError(
            f"none of {len(rows)} answers of {url} can be used: {worst.left_out} "
            f"({worst.finish_reason})"
        )
    return usable


@torch.inference_mode()
def _logits(target: Target, prompt: list[int], tokens: list[int]) -> Tensor:
    """The target's logits for each of `tokens` after the prompt, float32 [n, V]."""
    ids = torch.tensor([prompt + tokens[:-1]], device=target.device)
    return target.model(ids).logits[0, len(prompt) - 1 :].float()
