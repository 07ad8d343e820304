"""Notes of a plan: for which sizes it holds, and which numbers of the small model no config gives."""

from __future__ import annotations

from torch import nn

from ..axes import atoms
from ..edit import Cuts
from ..trace import GIVEN, Trace


def sizes_in_formulas(traced: Trace) -> str:
    """A note on sizes of the inputs that the model computes with: constants are folded for those of the example inputs."""
    found = {
        f"{e.size} ({use.how} in {use.module or 'the model'})": None
        for use in traced.formula_uses
        for e in traced.axes_in(use.source)
        if any(atom.frozen == GIVEN for atom in atoms(e))
    }
    shown = ", ".join(list(found)[:4]) + (" and others" if len(found) > 4 else "")
    return f"exact for inputs of this size: the model computes with the sizes {shown}" if found else ""


def outside_config(model: nn.Module, cuts: Cuts) -> dict[str, str]:
    """A note on numbers of layers that no number of the model's config gives, so that a model built from it has others."""
    folded = [a for a in cuts.attributes if type(a.new) is float]
    if not folded or not hasattr(getattr(model, "config", None), "to_dict"):
        return {}
    told = {a.new for a in folded if a.path.partition(".")[0] == "config"}
    why = "the cut changed it and no number of the config gives it: save with sc.save, because save_pretrained would lose it"
    return {f"{a.path}.{a.name}": why for a in folded if a.new not in told}
