"""What a model must be able to do before expensive work begins whose result it decodes."""

from transformers import PreTrainedModel

from decode.model.cache.cached_model import CachedLM
from decode.model.pretrained import is_sharded
from decode.model.trials import require_tree_masks


def require_trees(model: PreTrainedModel) -> None:
    """Check that a model can verify token trees, by a trial (`decode.model.trials`) of its kind.

    Call it before expensive work for a drafter that drafts trees. Raises UserError if the model
    ignores 4-D attention masks or positions, and as `CachedLM`.
    """
    require_tree_masks(CachedLM(model))


def require_decoding(model: PreTrainedModel) -> None:
    """Check that a model can be decoded, as `CachedLM` does. The model may have no weights. Call it
    before expensive work whose result it decodes. A sharded model is not checked, because this
    process cannot decode it. Raises UserError."""
    if not is_sharded(model):
        CachedLM(model)
