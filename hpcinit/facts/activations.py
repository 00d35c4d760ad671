"""What a rank's activations take, for a transformer.

Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models (arXiv:2205.05198), section 4, in
16 bit: s tokens, b samples, h hidden, a heads, t tensor parallel ranks. A layer takes s*b*h*(10 + 24/t + 5*a*s/(h*t))
bytes (equation 2; 34 + 5*a*s/h with t = 1). The last term is the scores of attention, which flash attention does not
keep. Full checkpointing keeps a layer's input, 2*s*b*h, and the whole of the layer at work.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcinit.facts.layout import Layout
from hpcinit.facts.memory import BYTES


@dataclass(frozen=True)
class Transformer:
    """heads: None with flash attention, whose scores are never whole. micro: samples of a forward pass."""

    layers: int
    hidden: int
    sequence: int
    micro: int
    heads: int | None = None


def of_rank(model: Transformer, layout: Layout, param: str, checkpointing: bool) -> int:
    """Bytes on one rank, without embedding and logits.

    cp divides the sequence. With pp the first stage has as many micro batches under way as there are stages (1F1B), so
    all layers count. In fp32 twice as much: the formula's few masks of a byte are counted with the rest.
    """
    samples = model.sequence // layout.cp * model.micro * model.hidden  # s*b*h
    scores = 5 * model.heads * model.sequence / (model.hidden * layout.tp) if model.heads else 0
    layer = samples * (10 + 24 / layout.tp + scores)
    kept = 2 * samples * model.layers + layer if checkpointing else layer * model.layers
    return int(kept * BYTES[param] / 2)
