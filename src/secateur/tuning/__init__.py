"""How much to prune, found by measuring a metric of the user: `sensitivity` layer by layer, `search` for a whole recipe.

- `measuring`: calls the user's function, and the journal that makes a long run resumable.
- `curves`: `sensitivity`, the metric against sparsity for each layer or group.
- `bisection`: `search`, the smallest model whose metric stays within a drop.
"""

from .bisection import SearchResult, Tried, search
from .curves import Sensitivity, sensitivity

__all__ = ["SearchResult", "Sensitivity", "Tried", "search", "sensitivity"]
