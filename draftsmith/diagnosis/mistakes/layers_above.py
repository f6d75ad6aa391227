"""Each hooked layer is one too high."""

from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.diagnosis.mistakes import MISTAKES, Mistake, copied, with_heads
from heads.heads_drafter import HeadsDrafter


@MISTAKES.register("layers_above")
class LayersAbove(Mistake):
    says = "the drafter gets the output of the layer above each layer that it was trained with"
    remedy = (
        "lower each number of the layer ids in the drafter's config.json by one (aux hidden state "
        "layer ids, or target_layer_ids): this engine counts the outputs of layers"
    )

    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        layers = drafter.captured_layers
        count = target.model.config.get_text_config().num_hidden_layers
        if not isinstance(drafter, HeadsDrafter) or not layers or min(layers) < 0:
            return None
        if max(layers) + 1 >= count:
            return None
        higher = tuple(layer + 1 for layer in layers)
        return with_heads(drafter, copied(drafter.heads, captured_layers=higher))
