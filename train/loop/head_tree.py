"""Calibrates the tree that a stage stores with its heads, on the dev split."""

from collections.abc import Callable

from decode.base.errors import UserError
from decode.drafters import Drafter
from decode.model.cache.requirements import require_trees
from decode.model.kinds.layer_kinds import require_slots
from decode.model.loading import Target
from heads.heads_module import Heads
from train.data.corpus import Corpus
from train.data.read import spread
from train.measure.calibrate_tree import NothingAccepted, TreeCalibration, calibrate_tree
from train.measure.ranks import Ranks
from train.settings.training import TreeConfig


def require_tree(settings: TreeConfig, target: Target, corpus: Corpus, *, stage: str) -> None:
    """Raise UserError before the training if the tree could not be planned after it: no dev split,
    prompts that do not fit, or a target that cannot verify trees.

    stage: the stage's name, for messages.
    """
    if "dev" not in corpus.examples:
        raise UserError(
            f"stage {stage} calibrates a tree, but data has no dev split; set data.dev, or leave "
            "tree out"
        )
    _prompts(settings, corpus)
    if target.has_weights:  # the checks run the model
        require_slots(target.model)
        require_trees(target.model)


def _prompts(settings: TreeConfig, corpus: Corpus) -> list[list[int]]:
    return corpus.prompts(spread(corpus.asked("dev"), settings.prompts))


def calibrated_tree(
    settings: TreeConfig,
    target: Target,
    corpus: Corpus,
    drafter: Drafter,
    heads: Heads,
    say: Callable[[str], None],
    ranks: Ranks,
) -> TreeCalibration | None:
    """The tree for a drafter made of `heads`; None if the first head was never right.

    say: prints a line. ranks: see `calibrate_tree`.
    """
    try:
        tree = calibrate_tree(
            target,
            drafter,
            _prompts(settings, corpus),
            nodes=settings.nodes,
            depth=heads.depth,
            width=min(settings.width, heads.rows),
            max_new_tokens=settings.max_new_tokens,
            progress=lambda what: say(f"  tree: measuring {what}"),
            ranks=ranks,
        )
    except NothingAccepted as error:
        say(f"  {error} The drafter drafts chains")
        return None
    say(f"  tree: {tree.verdict}")
    return tree
