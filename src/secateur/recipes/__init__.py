"""Recipes: files of stages (prune, shrink, gate, compress), each of which holds the arguments of one function and nothing else.

`schema` checks a file against the signatures of these functions. The `.yaml` files beside it are the recipes that ship with the
package.
"""

from .ran import Ran
from .recipe import Recipe, Stage, shipped
from .schema import BadRecipe
from .yaml12 import read_yaml

__all__ = ["BadRecipe", "Ran", "Recipe", "Stage", "read_yaml", "shipped"]
