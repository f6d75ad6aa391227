"""Each hooked layer is one too low."""

from decode.drafters import Drafter
from decode.model.loading import Target
from draftsmith.diagnosis.mistakes import MISTAKES, Mistake, copied, with_heads
from heads.heads_drafter import HeadsDrafter


@MISTAKES.register("layers_below")
class LayersBelow(Mistake):
    says = "the drafter gets the output of the layer below each layer that it was trained with"
    remedy = (
        "raise each number of the layer ids in the drafter's config.json by one (aux hidden state "
        "layer ids, or target_layer_ids): this engine counts the inputs of layers"
    )

    def make(self, drafter: Drafter, target: Target) -> Drafter | None:
        layers = drafter.captured_layers
        if not isinstance(drafter, HeadsDrafter) or not layers or min(layers) < 1:
            return None
        lower = tuple(layer - 1 for layer in layers)
        return with_heads(drafter, copied(drafter.heads, captured_layers=lower))
